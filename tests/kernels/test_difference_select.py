import pytest
import torch

from lightning_sparse.kernels import compact
from lightning_sparse.kernels.difference_select import difference_select

B = compact.BLOCK
SIZES = [[], [0], [1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_selection_leaves_its_inputs(path, make_pieces, check_selection, sizes, dtype):
    weights, anchors = make_pieces(sizes, dtype), make_pieces(sizes, seed=1)
    before = [piece.clone() for piece in weights + anchors]
    differences = [weight.float() - anchor for weight, anchor in zip(weights, anchors, strict=True)]
    for capacity, start in [(sum(sizes), 0), (sum(sizes) // 9, 0), (sum(sizes) // 9, sum(sizes) * 4 // 5)]:
        got = difference_select(weights, anchors, torch.tensor(1.5), capacity, start)
        check_selection(got, differences, 1.5, capacity, start)
    assert all(torch.equal(piece, copy) for piece, copy in zip(weights + anchors, before, strict=True))


def test_mixed_dtypes(path, make_pieces, check_selection):
    weights = [piece.to(dtype) for piece, dtype in zip(make_pieces([B + 5, 9, 70]), DTYPES, strict=True)]
    anchors = make_pieces([B + 5, 9, 70], seed=1)
    differences = [weight.float() - anchor for weight, anchor in zip(weights, anchors, strict=True)]
    got = difference_select(weights, anchors, torch.tensor(1.0), 4000)
    check_selection(got, differences, 1.0, 4000, 0)


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_corners(path, check_selection, corner, capacity):
    entries, threshold = corner
    got = difference_select([entries], [torch.zeros_like(entries)], torch.tensor(threshold), capacity, 1)
    check_selection(got, [entries], threshold, capacity, 1)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_equal_infinities_differ_by_nan(path):
    infinite = torch.tensor([float("inf"), 1.0])
    values, indices, count = difference_select([infinite], [infinite.clone()], torch.tensor(0.0), 2)
    assert values.tolist() == [0.0, 0.0]
    assert indices.tolist() == [0, 0]
    assert count.item() == 0


def test_parameters_need_no_detaching(path, check_selection):
    parameter, anchor = torch.nn.Parameter(torch.tensor([1.0, 0.0, -3.0])), torch.tensor([0.5, 0.0, 1.0])
    got = difference_select([parameter], [anchor], torch.tensor(2.0), 2)
    check_selection(got, [torch.tensor([0.5, 0.0, -4.0])], 2.0, 2, 0)
    assert not got[0].requires_grad
