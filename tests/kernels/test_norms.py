import math

import pytest
import torch

from lightning_sparse.kernels import norms as module
from lightning_sparse.kernels.norms import norms

B = module.BLOCK
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]]


def check(found, pieces, rel=1e-6):
    """Compares with exact sums of squares: fp32 sums of one block are all that rounds."""
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([math.hypot(*piece.tolist()) for piece in pieces], rel=rel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_norms(path, make_pieces, sizes, dtype):
    pieces = make_pieces(sizes, dtype)
    check(norms(pieces), pieces)


def test_norms_of_many_equal_entries_do_not_stall(path):
    # a running fp32 sum of 2**21 squares of 0.1 is off by a thousandth, one of vector lanes by some 1e-5
    numel = 2**17 + 3 if path == "interpreter" else 2**21 + 3
    assert norms([torch.full((numel,), 0.1)]).item() == pytest.approx(math.sqrt(numel) * 0.1, rel=5e-7)


@pytest.mark.parametrize("value", [1e-15, -3e15])
def test_small_and_large(path, value):
    pieces = [torch.full((B + 3,), value)]
    check(norms(pieces), pieces)


def test_half_precision_neither_overflows_nor_stalls(path):
    assert norms([torch.full((9000,), 300.0).half()]).item() == pytest.approx(300 * math.sqrt(9000))
    assert norms([torch.full((9000,), 1.0).bfloat16()]).item() == pytest.approx(math.sqrt(9000))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_not_finite(path):
    found = norms([torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.inf]), torch.tensor([3.0, 4.0])])
    assert math.isnan(found[0])
    assert found[1:].tolist() == [math.inf, 5.0]


def test_a_piece_does_not_depend_on_the_others(path, make_pieces):
    pieces = make_pieces([5 * B + 7, 3, B, 2 * B + 1])
    together = norms(pieces)
    assert torch.equal(together, torch.cat([norms([piece]) for piece in pieces]))
    assert torch.equal(together[[3, 1]], norms([pieces[3], pieces[1]]))


def test_mixed_dtypes_and_unaligned_views(path, make_pieces):
    pieces = [piece.to(dtype)[3:] for piece, dtype in zip(make_pieces([B + 5, 90, 70]), DTYPES, strict=True)]
    check(norms(pieces), pieces)


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]], ids=str)
def test_nothing(path, make_pieces, sizes):
    assert norms(make_pieces(sizes)).tolist() == [0.0] * len(sizes)


@pytest.mark.parametrize("size", [2**17 + extra for extra in (-1, 0, 1)])
def test_slices_of_the_torch_path(make_pieces, size):
    pieces = make_pieces([size, 3], seed=2)
    check(norms(pieces), pieces)


def test_messages():
    with pytest.raises(TypeError, match=r"vectors\[0\] must be one of torch.float32, .*, got torch.int64"):
        norms([torch.arange(4)])
