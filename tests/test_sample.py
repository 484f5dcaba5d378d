"""The sampled threshold asks nothing of the host: on a GPU it would wait for all that is queued before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sparse.accumulator import Difference, MomentumSum, Sum, Vectors
from lightning_sparse.compressors.sample import sampled_threshold
from lightning_sparse.protocols import Accumulator
from lightning_sparse.random import Draw


class OneDevice(TorchDispatchMode):
    """Raises where an operation reads or makes a tensor that is not on the meta device.

    That device holds no data, so `item`, `nonzero` and copies to the host fail there by themselves; copies from the
    host do not. `torch.tensor` copies unseen.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and x.device.type != "meta":
                raise RuntimeError(f"{op} moves a tensor between host and device")
        return out


def pieces(dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype, device="meta") for size in (100_000, 0, 7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "build",
    [
        lambda x, y: Vectors(x),
        lambda x, y: Sum(x, y),
        lambda x, y: Difference(x, y),
        lambda x, y: MomentumSum(x, y, y, 0.9, 0.5),
    ],
    ids=["vectors", "sum", "difference", "momentum"],
)
def test_threshold_waits_for_nothing(
    build: Callable[[list[Tensor], list[Tensor]], Accumulator], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = build(pieces(dtype), pieces(torch.float32))
    monkeypatch.delattr(torch, "tensor")
    with OneDevice():
        threshold = sampled_threshold(accumulator, 1000, 0.01, 4.0, Draw(0, 0, "w"))
    assert threshold.device.type == "meta"
    assert threshold.shape == ()
    assert threshold.dtype == torch.float32


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.tensor([1.0, 2.0]).to("meta"),
    ],
    ids=["item", "nonzero", "mask", "to-host", "from-host"],
)
def test_what_waits_is_noticed(wait: Callable[[Tensor], object]) -> None:
    x = torch.empty(2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)), OneDevice():
        wait(x)
