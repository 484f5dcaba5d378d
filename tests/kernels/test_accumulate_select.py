import pytest
import torch

from lightning_sparse.kernels import compact, compact_blocks
from lightning_sparse.kernels.accumulate_select import accumulate_select

B = compact.BLOCK
SIZES = [[], [0], [1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1], [0, 7, 0]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_selection_and_residual(path, make_pieces, check_selection, sizes, dtype):
    gradients, residuals = make_pieces(sizes, dtype), make_pieces(sizes, seed=1)
    sums = [residual + gradient.float() for residual, gradient in zip(residuals, gradients, strict=True)]
    for capacity, start in [(sum(sizes), 0), (sum(sizes) // 9, 0), (sum(sizes) // 9, sum(sizes) * 4 // 5)]:
        got = accumulate_select(gradients, residuals, torch.tensor(1.5), capacity, start)
        check_selection(got, sums, 1.5, capacity, start)
        assert all(torch.equal(residual, total) for residual, total in zip(residuals, sums, strict=True))
        gradients = [torch.zeros_like(gradient) for gradient in gradients]


def test_mixed_dtypes(path, make_pieces, check_selection):
    gradients = [piece.to(dtype) for piece, dtype in zip(make_pieces([B + 5, 9, 70]), DTYPES, strict=True)]
    residuals = make_pieces([B + 5, 9, 70], seed=1)
    sums = [residual + gradient.float() for residual, gradient in zip(residuals, gradients, strict=True)]
    got = accumulate_select(gradients, residuals, torch.tensor(1.0), 4000)
    check_selection(got, sums, 1.0, 4000, 0)
    assert all(torch.equal(residual, total) for residual, total in zip(residuals, sums, strict=True))


def test_unaligned_views(path, make_pieces, check_selection):
    gradients, residuals = ([make_pieces([2 * B], seed=seed)[0][3 : B + 9]] for seed in (0, 1))
    sums = [residuals[0] + gradients[0]]
    check_selection(accumulate_select(gradients, residuals, torch.tensor(2.0), 500), sums, 2.0, 500, 0)
    assert torch.equal(residuals[0], sums[0])


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_corners(path, check_selection, corner, capacity):
    entries, threshold = corner
    gradients, residuals = [entries], [torch.zeros_like(entries)]
    got = accumulate_select(gradients, residuals, torch.tensor(threshold), capacity, 1)
    check_selection(got, [entries], threshold, capacity, 1)
    assert torch.equal(residuals[0].nan_to_num(7.0), entries.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_denormal_gradients(path, dtype):
    least = torch.tensor([1, 2, -32767], dtype=torch.int16).view(dtype) if dtype != torch.float32 else None
    gradients = [least if least is not None else torch.tensor([2.0**-149, 2.0**-148, -(2.0**-149)])]
    residuals = [torch.zeros(3)]
    values, indices, count = accumulate_select(gradients, residuals, torch.tensor(0.0), 3)
    assert values.tolist() == residuals[0].tolist() == gradients[0].tolist()
    assert indices.tolist() == [0, 1, 2]
    assert count.item() == 3


@pytest.mark.parametrize("size", [compact_blocks.BLOCK + extra for extra in (-1, 0, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_block_edges_of_the_torch_path(make_pieces, check_selection, size, threads):
    sizes = [compact_blocks.STRIP - 3, 10, size - compact_blocks.STRIP, 5]
    gradients, residuals = make_pieces(sizes), make_pieces(sizes, seed=1)
    sums = [residual + gradient for residual, gradient in zip(residuals, gradients, strict=True)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = accumulate_select(gradients, residuals, torch.tensor(1.0), 60_000, size // 2)
    finally:
        torch.set_num_threads(before)
    check_selection(got, sums, 1.0, 60_000, size // 2)
    assert all(torch.equal(residual, total) for residual, total in zip(residuals, sums, strict=True))


def test_rotating_start_starves_no_entry(path):
    sizes, capacity = [B + 3, 0, 40], 1500
    numel, start, steps = sum(sizes), 0, 0
    gradients = [torch.ones(size) for size in sizes]
    residuals = [torch.zeros(size) for size in sizes]
    left = torch.zeros(numel, dtype=torch.bool)
    while not left.all():
        _, indices, _ = accumulate_select(gradients, residuals, torch.tensor(1.0), capacity, start)
        for index in indices.tolist():
            left[index] = True
        flat = torch.cat(residuals)
        flat[indices.long()] = 0.0
        residuals = [piece.clone() for piece in flat.split(sizes)]
        start, steps = (start + capacity) % numel, steps + 1
        assert steps <= -(-numel // capacity)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"threshold": torch.tensor([1.0])},
            TypeError,
            "threshold must be a 0-d float32 tensor, got",
        ),
        (
            {"gradients": [torch.ones(4).double()]},
            TypeError,
            "gradients[0] must be one of torch.float32,",
        ),
        (
            {"residuals": [torch.ones(4).half()]},
            TypeError,
            "residuals[0] must be one of torch.float32, got",
        ),
        (
            {"residuals": [torch.ones(3)]},
            ValueError,
            "must have the same sizes, got [4] and [3]",
        ),
        ({"residuals": [torch.ones(8)[::2]]}, ValueError, "residuals[0] must be 1-D and contiguous"),
        ({"gradients": [torch.ones(2, 2)]}, ValueError, "gradients[0] must be 1-D and contiguous, got shape (2, 2)"),
        ({"capacity": -1}, ValueError, "capacity must be at least 0, got -1"),
        ({"start": 4}, ValueError, "start must be in [0, 4), got 4"),
    ],
)
def test_messages(change, error, message):
    good = {"gradients": [torch.ones(4)], "residuals": [torch.ones(4)], "threshold": torch.tensor(1.0), "capacity": 2}
    with pytest.raises(error) as caught:
        accumulate_select(**(good | change))
    assert message in str(caught.value)
