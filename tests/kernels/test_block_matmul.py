import pytest
import torch

from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_matmul import block_matmul
from tests.kernels.blocks import CASES, Case, check_close, dense_twin, far_apart, make_blocks, make_layout, normal

HALF = [torch.bfloat16, torch.float16]


def run(case, dtype, transposed, with_bias=False):
    layout = make_layout(case)
    blocks = make_blocks(layout, dtype)
    x = normal(case.rows, case.out_features if transposed else case.in_features, dtype)
    bias = normal(1, case.out_features, dtype, seed=2)[0] if with_bias else None
    dense = dense_twin(blocks, layout)
    want = x.double() @ (dense if transposed else dense.t())
    if bias is not None:
        want = want + bias.double()
    check_close(block_matmul(x, blocks, layout, bias, transposed), want)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_product(path, case, transposed):
    run(case, torch.float32, transposed)


@pytest.mark.parametrize("dtype", [*HALF, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["odd", "shuffled"])
def test_dtypes(path, case, dtype):
    run(CASES[case], dtype, False, with_bias=True)
    run(CASES[case], dtype, True)


@pytest.mark.parametrize("case", ["odd", "empty"])
def test_bias(path, case):
    run(CASES[case], torch.float32, False, with_bias=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_more_rows_than_the_cpu_takes_at_a_time(transposed):
    run(Case(33, 48, 16, 1100, 0.5), torch.float32, transposed)


def test_strides(path):
    """Operands that are transposed, cut out, or expanded from one number."""
    layout = make_layout(CASES["odd"])
    blocks = make_blocks(layout, torch.float32)
    dense = dense_twin(blocks, layout)
    for x in (
        normal(75, 20, torch.float32).t(),
        normal(20, 100, torch.float32)[:, 7:82],
        torch.ones(1, 1).expand(20, 75),
    ):
        check_close(block_matmul(x, blocks, layout), x.double() @ dense.t())
    for y in (normal(37, 20, torch.float32).t(), torch.ones(1, 1).expand(20, 37)):
        check_close(block_matmul(y, blocks, layout, transposed=True), y.double() @ dense)


def test_same_bits_in_every_call(path):
    layout = make_layout(CASES["shuffled"])
    blocks, x = make_blocks(layout, torch.float32), normal(65, 100, torch.float32)
    assert torch.equal(block_matmul(x, blocks, layout), block_matmul(x, blocks, layout))


def test_dead_blocks_are_not_multiplied(path):
    """Zero times infinity would be NaN."""
    layout = BlockLayout.of(torch.tensor([[True, False]]), 16, 32, 16)
    x = torch.ones(2, 32)
    x[:, 16:] = float("inf")
    assert block_matmul(x, torch.ones(1, 16, 16), layout).tolist() == [[16.0] * 16] * 2


def test_offsets_beyond_32_bits(path):
    """Two rows that lie 2**31 entries apart; nothing between them is touched."""
    layout = make_layout(CASES["one-weight"])
    blocks = torch.full((1, 16, 16), 2.0, dtype=torch.float16)
    far = far_apart()
    far[0], far[1] = 1.0, 3.0
    assert block_matmul(far, blocks, layout).tolist() == [[2.0], [6.0]]


def test_messages():
    layout = make_layout(CASES["full"])
    blocks = make_blocks(layout, torch.float32)
    x = normal(3, 48, torch.float32)
    with pytest.raises(ValueError, match=r"blocks must be \[12, 16, 16\], got \[11, 16, 16\]"):
        block_matmul(x, blocks[1:], layout)
    with pytest.raises(ValueError, match=r"x must be \[rows, 48\], got \[3, 47\]"):
        block_matmul(x[:, 1:], blocks, layout)
    with pytest.raises(TypeError, match=r"x must be torch\.float32 on cpu, got torch\.float64 on cpu"):
        block_matmul(x.double(), blocks, layout)
    with pytest.raises(ValueError, match="bias must be None with transposed=True"):
        block_matmul(normal(3, 64, torch.float32), blocks, layout, torch.ones(64), transposed=True)
