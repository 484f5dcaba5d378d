import numpy as np
import pytest
import torch

from lightning_sparse.kernels import compact, compact_blocks
from lightning_sparse.kernels.momentum_select import momentum_select

B = compact.BLOCK
SIZES = [[], [0], [1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(gradients, velocities, residuals, momentum, scale):
    """Velocities and residuals by numpy, where every operation on fp32 rounds."""
    pieces = [[x.float().numpy() for x in group] for group in (gradients, velocities, residuals)]
    with np.errstate(invalid="ignore"):
        moved = [np.float32(momentum) * v + np.float32(scale) * g for g, v, _ in zip(*pieces, strict=True)]
        sums = [r + v for r, v in zip(pieces[2], moved, strict=True)]
    return [[torch.from_numpy(x) for x in group] for group in (moved, sums)]


def same(got, want):
    pairs = zip(got, want, strict=True)
    return all(torch.equal(a.nan_to_num(7.0).view(torch.int32), b.nan_to_num(7.0).view(torch.int32)) for a, b in pairs)


@pytest.mark.parametrize(("momentum", "scale"), [(0.9, 1.0), (0.0, 0.37), (0.99, 1 / 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_selection_velocity_and_residual(path, make_pieces, check_selection, sizes, dtype, momentum, scale):
    gradients = make_pieces(sizes, dtype)
    velocities, residuals = make_pieces(sizes, seed=1), make_pieces(sizes, seed=2)
    for capacity, start in [(sum(sizes), 0), (sum(sizes) // 9, sum(sizes) * 4 // 5)]:
        moved, sums = expected(gradients, velocities, residuals, momentum, scale)
        got = momentum_select(gradients, velocities, residuals, momentum, scale, torch.tensor(1.5), capacity, start)
        check_selection(got, sums, 1.5, capacity, start)
        assert same(velocities, moved)
        assert same(residuals, sums)


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_corners(path, check_selection, corner, capacity):
    entries, threshold = corner
    velocities, residuals = [torch.full_like(entries, -0.0)], [torch.full_like(entries, -0.0)]
    got = momentum_select([entries], velocities, residuals, 0.5, 1.0, torch.tensor(threshold), capacity, 1)
    check_selection(got, [entries], threshold, capacity, 1)
    assert same(velocities, [entries])
    assert same(residuals, [entries])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_denormals_and_ties_round_to_even(path, dtype):
    tiny = torch.finfo(dtype).tiny
    gradients = [torch.tensor([tiny, -tiny, tiny / 2, 3.0, 0.0], dtype=dtype)]
    velocities = [torch.tensor([2.0**-149, 3 * 2.0**-149, -(2.0**-127), 2.0**-149, 5 * 2.0**-149])]
    residuals = [torch.tensor([0.0, 2.0**-149, 0.0, 1.0, -0.0])]
    moved, sums = expected(gradients, velocities, residuals, 0.5, 0.5)
    momentum_select(gradients, velocities, residuals, 0.5, 0.5, torch.tensor(1.0), 2)
    assert same(velocities, moved)
    assert same(residuals, sums)


def test_mixed_dtypes_and_unaligned_views(path, make_pieces, check_selection):
    gradients = [piece.to(dtype)[3:] for piece, dtype in zip(make_pieces([B + 5, 19, 70]), DTYPES, strict=True)]
    velocities, residuals = ([piece[3:] for piece in make_pieces([B + 5, 19, 70], seed=seed)] for seed in (1, 2))
    moved, sums = expected(gradients, velocities, residuals, 0.9, 0.7)
    got = momentum_select(gradients, velocities, residuals, 0.9, 0.7, torch.tensor(1.0), 4000)
    check_selection(got, sums, 1.0, 4000, 0)
    assert same(velocities, moved)
    assert same(residuals, sums)


@pytest.mark.parametrize("size", [compact_blocks.BLOCK + extra for extra in (-1, 0, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_block_edges_of_the_torch_path(make_pieces, check_selection, size, threads):
    sizes = [compact_blocks.STRIP - 3, 10, size - compact_blocks.STRIP, 5]
    gradients, velocities, residuals = (make_pieces(sizes, seed=seed) for seed in range(3))
    moved, sums = expected(gradients, velocities, residuals, 0.9, 0.7)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = momentum_select(gradients, velocities, residuals, 0.9, 0.7, torch.tensor(1.5), 60_000, size // 2)
    finally:
        torch.set_num_threads(before)
    check_selection(got, sums, 1.5, 60_000, size // 2)
    assert same(velocities, moved)
    assert same(residuals, sums)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"velocities": [torch.ones(4).half()]}, TypeError, "velocities[0] must be one of torch.float32, got"),
        ({"velocities": [torch.ones(3)]}, ValueError, "gradients and velocities must have the same sizes"),
        ({"residuals": [torch.ones(3)]}, ValueError, "gradients and residuals must have the same sizes"),
        ({"capacity": -1}, ValueError, "capacity must be at least 0, got -1"),
    ],
)
def test_messages(change, error, message):
    good = {name: [torch.ones(4)] for name in ("gradients", "velocities", "residuals")}
    good |= {"momentum": 0.9, "scale": 1.0, "threshold": torch.tensor(1.0), "capacity": 2}
    with pytest.raises(error) as caught:
        momentum_select(**(good | change))
    assert message in str(caught.value)
