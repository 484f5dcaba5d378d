import pytest
import torch

from lightning_sparse.kernels.take import BLOCK, take

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [BLOCK - 1], [BLOCK], [BLOCK + 1], [5003], [0, 600, 0, 3, 700, 1], [7] * 300]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{sizes[0]}")
@pytest.mark.parametrize("padding", [0, 9])
def test_entries_one_by_one(path, make_pieces, sizes, dtype, index_dtype, padding):
    vectors = make_pieces(sizes, dtype)
    whole = torch.cat(vectors).float().tolist()
    indices = torch.arange(0, sum(sizes), 2, dtype=index_dtype)
    values = make_pieces([indices.numel()], seed=1)[0]
    values[3::5] = 0.0
    values, indices = (torch.cat([x, torch.zeros(padding, dtype=x.dtype)]) for x in (values, indices))
    pairs = zip(values.tolist(), indices.tolist(), strict=True)
    assert take(vectors, values, indices).tolist() == [whole[at] if value != 0 else 0.0 for value, at in pairs]


def test_mixed_dtypes_and_special_values(path):
    inf, nan = float("inf"), float("nan")
    vectors = [torch.tensor([nan, -inf, -0.0, 6e-8], dtype=dtype) for dtype in DTYPES]
    got = take(vectors, torch.ones(12), torch.arange(12))
    want = torch.cat([x.float() for x in vectors])
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(got.signbit()[1:3], want.signbit()[1:3])
    # a payload's NaN is a value
    assert take(vectors, torch.full((1,), nan), torch.tensor([1])).tolist() == [-inf]


def test_indices_outside_give_zero(path):
    memory = torch.arange(12.0)
    indices = torch.tensor([-5, -1, 2, 4, 1000, 2**31 - 1], dtype=torch.int32)
    assert take([memory[4:6], memory[6:8]], torch.ones(6), indices).tolist() == [0, 0, 6, 0, 0, 0]


@pytest.mark.parametrize("vectors", [[], [torch.zeros(0)], [torch.ones(3)]], ids=["none", "empty", "some"])
@pytest.mark.parametrize("k", [0, 4])
def test_nothing_to_take(path, vectors, k):
    assert take(vectors, torch.zeros(k), torch.zeros(k, dtype=torch.int32)).tolist() == [0.0] * k


def test_narrow_indices_reach_into_a_vector_of_more_than_they_count(path):
    """2 ** 31 entries and more, out of one piece that stands there many times."""
    piece = torch.arange(1 << 20).float()
    at = torch.tensor([3, 2**31 - 1], dtype=torch.int32)
    assert take([piece] * 2049, torch.ones(2), at).tolist() == [3, (1 << 20) - 1]
    far = torch.tensor([3, 2**31 + 5])
    assert take([piece] * 2049, torch.ones(2), far).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": torch.ones(2)}, ValueError, "values and indices must have one size, got 2 and 1"),
        ({"values": torch.ones(1).half()}, TypeError, "values[0] must be one of torch.float32, got torch.float16"),
        ({"indices": torch.ones(1)}, TypeError, "indices[0] must be one of torch.int32, torch.int64, got"),
        ({"vectors": [torch.ones(4).int()]}, TypeError, "vectors[0] must be one of torch.float32, torch.bfloat16"),
    ],
)
def test_messages(change, error, message):
    good = {"vectors": [torch.ones(4)], "values": torch.ones(1), "indices": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(error) as caught:
        take(**(good | change))
    assert message in str(caught.value)
