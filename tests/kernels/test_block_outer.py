import pytest
import torch

from lightning_sparse.kernels.block_outer import block_outer
from tests.kernels.blocks import CASES, Case, check_close, far_apart, make_layout, normal


def expected(x, y, layout):
    """Every stored block cut out of the dense product, zero beyond it."""
    dense = x.double().t() @ y.double()
    out = torch.zeros(layout.count, layout.block, layout.block, dtype=torch.float64)
    for slot, (row, col) in enumerate(zip(layout.rows.tolist(), layout.cols.tolist(), strict=True)):
        i, o = col * layout.block, row * layout.block
        piece = dense[i : i + layout.block, o : o + layout.block]
        out[slot, : piece.shape[0], : piece.shape[1]] = piece
    return out


def run(case, dtype):
    layout = make_layout(case)
    x, y = normal(case.rows, case.in_features, dtype), normal(case.rows, case.out_features, dtype, seed=3)
    check_close(block_outer(x, y, layout), expected(x, y, layout))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_product(path, case):
    run(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["odd", "shuffled"])
def test_dtypes(path, case, dtype):
    run(CASES[case], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_more_rows_than_the_cpu_takes_at_a_time(dtype):
    run(Case(33, 48, 16, 1100, 0.5), dtype)


def test_strides(path):
    layout = make_layout(CASES["odd"])
    x = normal(75, 20, torch.float32).t()
    for y in (normal(37, 20, torch.float32).t(), torch.ones(1, 1).expand(20, 37)):
        check_close(block_outer(x, y, layout), expected(x, y, layout))


def test_same_bits_in_every_call(path):
    layout = make_layout(CASES["shuffled"])
    x, y = normal(65, 100, torch.float32), normal(65, 80, torch.float32, seed=3)
    assert torch.equal(block_outer(x, y, layout), block_outer(x, y, layout))


def test_offsets_beyond_32_bits(path):
    """Two rows that lie 2**31 entries apart; nothing between them is touched."""
    layout = make_layout(CASES["one-weight"])
    far = far_apart()
    far[0], far[1] = 1.0, 3.0
    assert block_outer(far, far, layout)[0, 0, 0] == 10.0


def test_messages():
    layout = make_layout(CASES["full"])
    x, y = normal(3, 48, torch.float32), normal(3, 64, torch.float32)
    with pytest.raises(ValueError, match=r"y must be \[rows, 64\], got \[3, 63\]"):
        block_outer(x, y[:, 1:], layout)
    with pytest.raises(ValueError, match="x and y must have one number of rows, got 3 and 2"):
        block_outer(x, y[1:], layout)
    with pytest.raises(TypeError, match=r"y must be torch\.float32 on cpu, got torch\.float16 on cpu"):
        block_outer(x, y.half(), layout)
