import subprocess
import sys

import pytest
import torch

from lightning_sparse.kernels import compact
from lightning_sparse.kernels.select import select

B = compact.BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [[], [0], [1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]], ids=str)
def test_selection(path, make_pieces, check_selection, sizes, dtype):
    vectors = make_pieces(sizes, dtype)
    exact = [piece.float() for piece in vectors]
    for capacity, start in [(sum(sizes), 0), (sum(sizes) // 9, sum(sizes) * 4 // 5)]:
        check_selection(select(vectors, torch.tensor(1.5), capacity, start), exact, 1.5, capacity, start)


@pytest.mark.parametrize("start", range(12))
@pytest.mark.parametrize("capacity", [3, 5, 6])
def test_every_start(path, check_selection, start, capacity):
    vectors = [torch.tensor([0.0, 2.0, 0.0, 2.0]), torch.tensor([]), torch.tensor([2.0, 0.0, 0.0, 2.0, 2.0, 0, 0, 0])]
    check_selection(select(vectors, torch.tensor(1.0), capacity, start), vectors, 1.0, capacity, start)


def test_corners(path, check_selection, corner):
    entries, threshold = corner
    check_selection(select([entries], torch.tensor(threshold), 4), [entries], threshold, 4, 0)


@pytest.fixture
def flushing():
    """Denormals read as zero on this thread."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1e-40, 2.0**-126, 1.5])
def test_zeros_are_left_out_where_denormals_are_flushed(path, flushing, check_selection, threshold):
    entries = torch.zeros(100)
    entries[[3, 40, 70]] = torch.tensor([1.5, -2.0, 2.0**-126])
    check_selection(select([entries], torch.tensor(threshold), 5), [entries], threshold, 5, 0)


def test_parameters_need_no_detaching(path, check_selection):
    parameter = torch.nn.Parameter(torch.tensor([1.0, 0.0, -3.0]))
    got = select([parameter], torch.tensor(2.0), 2)
    check_selection(got, [parameter], 2.0, 2, 0)
    assert not got[0].requires_grad


def test_import_leaves_triton_alone():
    code = """
import sys, lightning_sparse
before = "triton" in sys.modules
import lightning_sparse.kernels.select
sys.exit(("triton" in sys.modules) != before)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
