import math

import pytest
import torch

from lightning_sparse.kernels import kth_largest as module
from lightning_sparse.kernels.kth_largest import kth_largest
from lightning_sparse.kernels.select import select

B = module.BLOCK
SIZES = [[1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(pieces, k):
    """Sorts all magnitudes, NaN as zero."""
    magnitudes = sorted((abs(x) if x == x else 0.0 for piece in pieces for x in piece.tolist()), reverse=True)
    return magnitudes[k - 1] if k <= len(magnitudes) else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_threshold(path, make_pieces, sizes, dtype):
    pieces, numel = make_pieces(sizes, dtype), sum(sizes)
    for k in {1, max(1, numel // 100), max(1, numel // 2), numel, numel + 1}:
        threshold = kth_largest(pieces, k)
        assert threshold.dtype == torch.float32
        assert threshold.shape == ()
        assert threshold.item() == expected(pieces, k)
        values, _, count = select(pieces, threshold, numel)
        live = sum(int((piece != 0).sum()) for piece in pieces)
        assert count.item() >= min(k, live)
        assert (values.abs() > threshold).sum() < k


@pytest.mark.parametrize("k", range(1, 12))
def test_corners(path, corner, k):
    entries = torch.cat([corner[0], corner[0].new_tensor([0.0, 2.0, -2.0, 2.0**-126])])
    assert kth_largest([entries], k).item() == expected([entries], k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -2.5, 2.0**-149, 6e-8, math.inf, -math.inf, math.nan], ids="{:.1e}".format
)
def test_all_equal(path, value, dtype):
    pieces = [torch.full((size,), value, dtype=dtype) for size in (70, 0, 3)]
    for k in (1, 73, 74):
        assert kth_largest(pieces, k).item() == expected(pieces, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_digit_decides(path, dtype):
    """All magnitudes that differ from 1 in one bit, above and below."""
    bits = torch.tensor(1.0, dtype=dtype).view(torch.int32 if dtype == torch.float32 else torch.int16)
    flips = [1 << bit for bit in range(8 * dtype.itemsize - 1)]
    entries = torch.stack([bits ^ flip for flip in flips]).view(dtype)
    for k in range(1, len(flips) + 2):
        assert kth_largest([entries], k).item() == expected([entries], k)


def test_mixed_dtypes_and_unaligned_views(path, make_pieces):
    pieces = [piece.to(dtype)[3:] for piece, dtype in zip(make_pieces([B + 5, 90, 70]), DTYPES, strict=True)]
    for k in (1, 40, 4000):
        assert kth_largest(pieces, k).item() == expected(pieces, k)


def test_more_blocks_than_programs(path, make_pieces, monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", 2)
    pieces = make_pieces([3 * B + 1, B])
    assert kth_largest(pieces, 700).item() == expected(pieces, 700)


@pytest.mark.parametrize("size", [2**18 + extra for extra in (-1, 0, 1)])
def test_block_edges_of_the_torch_path(make_pieces, size):
    pieces = make_pieces([size, 3], seed=2)
    assert kth_largest(pieces, size // 7).item() == expected(pieces, size // 7)


@pytest.mark.parametrize("pieces", [[], [torch.zeros(0)]], ids=["none", "empty"])
def test_nothing_to_choose_from(path, pieces):
    assert kth_largest(pieces, 3).item() == 0.0


def test_messages():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        kth_largest([torch.ones(4)], 0)
    with pytest.raises(TypeError, match=r"vectors\[0\] must be one of torch.float32, .*, got torch.float64"):
        kth_largest([torch.ones(4).double()], 1)
