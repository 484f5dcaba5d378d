import pytest
import torch

from lightning_sparse.kernels.nm_prune import nm_prune, nm_prune_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def expected(weight, n, m):
    """A group at a time: positions sorted by magnitude, equal ones by position."""
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    for row, values in enumerate(weight.tolist()):
        for first in range(0, len(values), m):
            places = sorted(range(first, min(first + m, len(values))), key=lambda at: (-abs(values[at]), at))
            mask[row, places[:n]] = True
    return torch.where(mask, weight, torch.zeros_like(weight)), mask


def check(weight, n, m):
    pruned, mask = nm_prune(weight, n, m)
    want_pruned, want_mask = expected(weight, n, m)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, want_mask)
    assert pruned.dtype == weight.dtype
    assert torch.equal(pruned, want_pruned)


def normal(rows, columns, dtype=torch.float32):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2), (3, 8), (4, 4), (5, 16)])
def test_largest_are_kept(path, n, m, dtype):
    check(normal(7, 37, dtype), n, m)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (1, 2047), (513, 4), (2, 3), (0, 8), (4, 0)], ids=str)
def test_shapes(path, shape):
    check(normal(*shape), 2, 4)


def test_ties_keep_the_first(path):
    check(torch.zeros(2, 10), 2, 4)
    check(torch.tensor([[1.0, -2.0, 2.0, -2.0, 0.0, -0.0, 0.0, 1.0]]), 2, 4)
    check(torch.tensor([[float("inf"), -float("inf"), 5.0, float("inf")]]), 2, 4)


def test_strided_weights(path):
    check(normal(12, 9).t(), 2, 4)


def test_what_is_pruned_stays_pruned(path):
    pruned, mask = nm_prune(normal(5, 64), 2, 4)
    assert mask.view(5, 16, 4).sum(2).eq(2).all()
    assert torch.equal(nm_prune(pruned, 2, 4)[0], pruned)


def test_paths_agree_on_nan():
    weight = normal(4, 32)
    weight[1, 3], weight[2, 8], weight[2, 9] = float("nan"), float("nan"), float("nan")
    from lightning_sparse.kernels.path import interpret

    with interpret():
        mask = nm_prune(weight, 2, 4)[1]
    assert torch.equal(mask, nm_prune_torch(weight, 2, 4)[1])


def test_messages():
    with pytest.raises(ValueError, match=r"m must be one of \(2, 4, 8, 16\), got 3"):
        nm_prune(normal(2, 6), 2, 3)
    with pytest.raises(ValueError, match=r"n must be in \[1, 4\], got 0"):
        nm_prune(normal(2, 8), 0, 4)
    with pytest.raises(ValueError, match=r"weight must have two dimensions, got \[2, 3, 4\]"):
        nm_prune(torch.zeros(2, 3, 4), 2, 4)
