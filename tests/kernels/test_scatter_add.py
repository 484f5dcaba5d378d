import numpy as np
import pytest
import torch

from lightning_sparse.kernels.scatter_add import BLOCK, scatter_add_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [BLOCK - 1], [BLOCK], [BLOCK + 1], [5003], [0, 600, 0, 3, 700, 1]]


def expected(targets, values, indices, alpha):
    """Scatters one entry at a time: product and sum rounded in numpy's fp32, then to the target's dtype."""
    out = [target.clone() for target in targets if target.numel()]
    places = [(target, i) for target in out for i in range(target.numel())]
    for value, index in zip(values.numpy(), indices.tolist(), strict=True):
        product = value * np.float32(alpha)
        if product != 0 and 0 <= index < len(places):
            target, i = places[index]
            target[i] = float(np.float32(target[i].item()) + product)
    return out


def scattered(targets, values, indices, alpha):
    out = [target.clone() for target in targets]
    scatter_add_(out, values, indices, alpha)
    return [target for target in out if target.numel()]


@pytest.mark.parametrize(
    ("alpha", "index_dtype"), [(1.0, torch.int32), (1 / 3, torch.int64), (-0.7, torch.int32)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sum(path, make_pieces, sizes, dtype, alpha, index_dtype):
    targets = make_pieces(sizes, dtype)
    indices = torch.arange(0, sum(sizes), 2, dtype=index_dtype)
    values = make_pieces([indices.numel()], seed=1)[0]
    values[3::5] = 0.0
    values, indices = (torch.cat([x, torch.zeros(9, dtype=x.dtype)]) for x in (values, indices))
    for got, want in zip(
        scattered(targets, values, indices, alpha), expected(targets, values, indices, alpha), strict=True
    ):
        assert torch.equal(got, want)


def test_mixed_dtypes(path, make_pieces):
    targets = [piece.to(dtype) for piece, dtype in zip(make_pieces([50, 60, 70]), DTYPES, strict=True)]
    values, indices = make_pieces([180], seed=1)[0], torch.arange(180)
    for got, want in zip(
        scattered(targets, values, indices, 0.3), expected(targets, values, indices, 0.3), strict=True
    ):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(path, dtype):
    inf, nan = float("inf"), float("nan")
    targets = [torch.tensor([1.0, inf, 2.0, 3.0, -0.0, 6e-8], dtype=dtype)]
    values, indices = torch.tensor([nan, -inf, inf, -inf, 0.0, 6e-8]), torch.arange(6)
    got, want = scattered(targets, values, indices, 1.0)[0], expected(targets, values, indices, 1.0)[0]
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert got[:2].isnan().all()
    assert torch.signbit(got[4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ties_round_to_even(path, dtype):
    step = torch.finfo(dtype).eps
    targets = [torch.tensor([1.0, 1.0 + step], dtype=dtype)]
    scatter_add_(targets, torch.full((2,), step / 2), torch.arange(2))
    assert targets[0].tolist() == [1.0, 1.0 + 2 * step]


def test_indices_outside_are_skipped(path):
    memory = torch.zeros(12)
    indices = torch.tensor([-5, -1, 2, 4, 1000, 2**31 - 1], dtype=torch.int32)
    scatter_add_([memory[4:6], memory[6:8]], torch.ones(6), indices)
    assert memory.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]


def test_narrow_indices_reach_into_a_vector_of_more_than_they_count(path):
    """2 ** 31 entries and more, out of one piece that stands there many times."""
    piece = torch.zeros(1 << 20)
    scatter_add_([piece] * 2049, torch.ones(2), torch.tensor([3, 2**31 - 1], dtype=torch.int32))
    scatter_add_([piece] * 2049, torch.ones(2), torch.tensor([4, 2**31 + 5]))
    assert piece.nonzero().squeeze(1).tolist() == [3, 4, 5, (1 << 20) - 1]


@pytest.mark.parametrize("targets", [[], [torch.zeros(0)], [torch.zeros(3)]], ids=["none", "empty", "some"])
@pytest.mark.parametrize("k", [0, 4])
def test_nothing_to_add(path, targets, k):
    scatter_add_(targets, torch.zeros(k), torch.zeros(k, dtype=torch.int32), 0.5)
    assert all(not target.any() for target in targets)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alpha": float("inf")}, ValueError, "alpha must be finite in fp32, got inf: it would turn padding into NaN"),
        ({"alpha": float("nan")}, ValueError, "alpha must be finite in fp32, got nan"),
        ({"alpha": -1e300}, ValueError, "alpha must be finite in fp32, got -1e+300"),
        ({"values": torch.ones(2)}, ValueError, "values and indices must have one size, got 2 and 1"),
        ({"values": torch.ones(1).half()}, TypeError, "values[0] must be one of torch.float32, got torch.float16"),
        (
            {"indices": torch.ones(1)},
            TypeError,
            "indices[0] must be one of torch.int32, torch.int64, got",
        ),
        ({"targets": [torch.ones(4).int()]}, TypeError, "targets[0] must be one of torch.float32, torch.bfloat16"),
    ],
)
def test_messages(change, error, message):
    good = {"targets": [torch.ones(4)], "values": torch.ones(1), "indices": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(error) as caught:
        scatter_add_(**(good | change))
    assert message in str(caught.value)
