import math
from statistics import fmean, pvariance

import pytest
import torch

from lightning_sparse.kernels import moments as module
from lightning_sparse.kernels.moments import moments

B = module.BLOCK
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]]


def check(found, pieces):
    """Compares with float64 sums over a list: fp32 sums of one block are all that rounds."""
    live = [abs(x) for piece in pieces for x in piece.tolist() if x == x and x != 0]
    assert found.counted.dtype == torch.int64
    assert found.counted.item() == len(live)
    assert all(x.dtype == torch.float64 and x.shape == () for x in found[1:])
    mean = fmean(live)
    assert found.mean.item() == pytest.approx(mean, rel=2e-6)
    assert found.variance.item() == pytest.approx(pvariance(live), rel=2e-5, abs=1e-12 * mean**2)
    assert found.log_mean.item() == pytest.approx(fmean(map(math.log, live)), rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_moments(path, make_pieces, sizes, dtype):
    pieces = make_pieces(sizes, dtype)
    check(moments(pieces), pieces)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_nan_are_left_out(path, make_pieces, dtype):
    pieces = make_pieces([B + 5, 70], dtype)
    pieces[0][::3], pieces[1][::5], pieces[1][1] = 0.0, -0.0, math.nan
    found = moments(pieces)
    check(found, pieces)
    numel = B + 75
    whole = [abs(x) if x == x else 0.0 for piece in pieces for x in piece.tolist()]
    count, mean, variance, log_mean = found.with_zeros(numel)
    assert count.item() == numel
    assert mean.item() == pytest.approx(fmean(whole), rel=2e-6)
    assert variance.item() == pytest.approx(pvariance(whole), rel=2e-5)
    assert log_mean == found.log_mean


@pytest.mark.parametrize("value", [1.0, -0.3, 2.0**-149, 3e-30, -1e30, 6e33])
def test_all_equal(path, value):
    pieces = [torch.full((B + 3,), value), torch.full((7,), value)]
    check(moments(pieces), pieces)


def test_denormals(path):
    pieces = [torch.tensor([2.0**-149, -(2.0**-148), 2.0**-126, 0.0])]
    check(moments(pieces), pieces)


def test_a_large_mean_does_not_drown_the_variance(path, make_pieces):
    pieces = [1000 + 0.01 * piece for piece in make_pieces([3 * B + 1])]
    found = moments(pieces)
    assert found.variance.item() == pytest.approx(pvariance(pieces[0].tolist()), rel=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_infinite_entries(path, infinite):
    found = moments([torch.tensor([infinite, 1.0, 0.0])])
    assert found.counted.item() == 2
    assert found.mean.item() == math.inf
    assert math.isnan(found.variance)
    assert found.log_mean.item() == math.inf


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("at", [5, 2**17 + 5])
def test_infinity_meets_other_blocks_and_pieces(path, at):
    x = torch.ones(2**17 + B)
    x[at] = math.inf
    for pieces in ([torch.tensor([math.inf]), torch.ones(3)], [torch.ones(3), torch.tensor([-math.inf])], [x]):
        found = moments(pieces)
        assert found.counted.item() == sum(piece.numel() for piece in pieces)
        assert found.mean.item() == found.log_mean.item() == math.inf
        assert math.isnan(found.variance)


def test_sums_beyond_fp32(path):
    pieces = [torch.full((2**17 + 3,), 3e33), torch.full((7,), 8e33)]
    check(moments(pieces), pieces)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("pieces", [[], [torch.zeros(0)], [torch.zeros(5)], [torch.full((5,), math.nan)]], ids=str)
def test_nothing_live(path, pieces):
    found = moments(pieces)
    assert found.counted.item() == 0
    assert all(math.isnan(x) for x in found[1:])
    whole = found.with_zeros(sum(piece.numel() for piece in pieces))
    assert whole.mean.item() == whole.variance.item() == 0.0


def test_mixed_dtypes_and_unaligned_views(path, make_pieces):
    pieces = [piece.to(dtype)[3:] for piece, dtype in zip(make_pieces([B + 5, 90, 70]), DTYPES, strict=True)]
    check(moments(pieces), pieces)


@pytest.mark.parametrize("size", [2**17 + extra for extra in (-1, 0, 1)])
def test_block_edges_of_the_torch_path(make_pieces, size):
    pieces = make_pieces([size, 3], seed=2)
    check(moments(pieces), pieces)


def test_the_same_every_time(path, make_pieces):
    pieces = make_pieces([5 * B + 7])
    assert torch.equal(torch.stack(moments(pieces)[1:]), torch.stack(moments(pieces)[1:]))


def test_messages():
    with pytest.raises(TypeError, match=r"vectors\[0\] must be one of torch.float32, .*, got torch.int64"):
        moments([torch.arange(4)])
    with pytest.raises(ValueError, match=r"vectors\[1\] must be 1-D and contiguous, got shape \(2, 2\)"):
        moments([torch.ones(4), torch.ones(2, 2)])
