"""Both paths of every op, uninitialised memory that shows, and selections worked out one entry at a time."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from lightning_sparse.kernels.path import interpret


@pytest.fixture(params=["interpreter", "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on the kernels, interpreted, and again on the torch path."""
    if request.param == "torch":
        yield request.param
    else:
        with interpret():
            yield request.param


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what `torch.empty` returns with NaN, or with the largest integer."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        out = empty(*args, **kwargs)
        if out.dtype == torch.bool:
            return out.fill_(True)
        return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


Selection = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def check_selection() -> Callable[[Selection, Sequence[Tensor], float, int, int], None]:
    """A function that compares a selection from pieces of fp32 with one made by a loop over entries."""

    def check(got: Selection, pieces: Sequence[Tensor], threshold: float, capacity: int, start: int) -> None:
        entries = [value for piece in pieces for value in piece.tolist()]
        limit = torch.tensor(threshold).item()
        picked = [i for i, value in enumerate(entries) if abs(value) >= limit and value != 0.0]
        taken = sorted(([i for i in picked if i >= start] + [i for i in picked if i < start])[:capacity])
        padding = [0] * (capacity - len(taken))
        values, indices, count = got
        assert count.dtype == torch.int64
        assert count.shape == ()
        assert count.item() == len(picked)
        assert indices.dtype == torch.int32
        assert indices.tolist() == taken + padding
        assert values.dtype == torch.float32
        assert values.tolist() == [entries[i] for i in taken] + padding

    return check


@pytest.fixture
def make_pieces() -> Callable[..., list[Tensor]]:
    """A function from sizes, dtype and seed to pieces of standard normal entries."""

    def make(sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(size, generator=generator).to(dtype) for size in sizes]

    return make


INF, NAN, TINY = float("inf"), float("nan"), 2.0**-149


@pytest.fixture(
    params=[
        pytest.param(([0.0, -0.0, 0.0], 0.0), id="all-zero"),
        pytest.param(([0.0, 3.0, -1.0], -1.0), id="negative-threshold"),
        pytest.param(([0.5, -0.5, 0.5, -0.5], 0.5), id="all-equal"),
        pytest.param(([TINY, -TINY, 0.0, 2 * TINY, -3 * TINY], 2 * TINY), id="denormals"),
        pytest.param(([TINY, -TINY, 0.0], 0.0), id="denormals-above-zero"),
        pytest.param(([INF, 1.0, -INF, 3.0], 2.0), id="infinite"),
        pytest.param(([INF, 1.0, -INF, 3.0], INF), id="infinite-threshold"),
        pytest.param(([NAN, 1.0, -NAN, 3.0], 2.0), id="nan"),
        pytest.param(([NAN, NAN], 0.0), id="all-nan"),
        pytest.param(([1.0, 2.0, INF], NAN), id="nan-threshold"),
    ]
)
def corner(request: pytest.FixtureRequest) -> tuple[Tensor, float]:
    """Entries and a threshold that ordinary ones do not cover."""
    entries, threshold = request.param
    return torch.tensor(entries), threshold
