import math

import pytest
import torch

from lightning_sparse.kernels import lamb_norms as module
from lightning_sparse.kernels.adam import Adam
from lightning_sparse.kernels.lamb_norms import lamb_norms
from lightning_sparse.kernels.lamb_step import lamb_step_
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.weights import CACHED

B = module.BLOCK
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]]
NUMBERS = Adam(0.9, 0.999, 1 / (1 - 0.9**3), 1 / (1 - 0.999**3), 1e-6, 0.01)
OTHER = [Adam(0.0, 0.5, 1.0, 1.0, 1e-3, 0.0), Adam(0.8, 0.99, 2.0, 3.0, 0.0, 0.3)]


def inputs(make_pieces, sizes, dtype=torch.float32):
    """Weights, gradients, first moments, and second moments above zero."""
    w, g, m, v = (make_pieces(sizes, dtype if seed < 2 else torch.float32, seed) for seed in range(4))
    return w, g, m, [x.square() for x in v]


def root(x, fused):
    """As a GPU rounds it; torch's vectorised root on the CPU is off by one bit now and then."""
    return torch.sqrt(x.double()).float() if fused and use_triton(x) else torch.sqrt(x)


def expected(w, g, m, v, adam, fused):
    """One operation at a time, each rounded to fp32: the update and both moments."""
    wide, g = w.to(torch.float32), g.to(torch.float32)
    m = adam.beta1 * m + (1 - adam.beta1) * g
    v = adam.beta2 * v + (1 - adam.beta2) * (g * g)
    below = root(adam.second_scale * v, fused) + adam.eps
    return (adam.first_scale * m) / below + adam.decay * wide, m, v


def check(w, g, m, v, adam, fused=True):
    want = [expected(*row, adam, fused) for row in zip(w, g, m, v, strict=True)]
    kept = [[x.clone() for x in pieces] for pieces in (w, g, m, v)]
    found = lamb_norms(w, g, m, v, adam, fused=fused)
    assert (found.dtype, found.shape) == (torch.float32, (2, len(w)))
    assert found[0].tolist() == pytest.approx([math.hypot(*x.tolist()) for x in w], rel=1e-6)
    assert found[1].tolist() == pytest.approx([math.hypot(*u.tolist()) for u, _, _ in want], rel=1e-6)
    for before, after in zip(kept, (w, g, m, v), strict=True):
        assert all(map(torch.equal, before, after))
    scale = torch.linspace(0.01, 0.5, len(w))
    lamb_step_(w, g, m, v, scale, adam, fused=fused)
    for i, (update, first, second) in enumerate(want):
        assert torch.equal(w[i], (kept[0][i].float() - scale[i] * update).to(w[i].dtype))
        assert torch.equal(m[i], first)
        assert torch.equal(v[i], second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(path, make_pieces, sizes, dtype):
    check(*inputs(make_pieces, sizes, dtype), NUMBERS)


@pytest.mark.parametrize("adam", OTHER, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_options(path, make_pieces, adam):
    check(*inputs(make_pieces, [700, 0, 9]), adam)


def test_mixed_dtypes_and_unaligned_views(path, make_pieces):
    cut = [[x[3:] for x in pieces] for pieces in inputs(make_pieces, [B + 5, 90, 70])]
    for pieces in cut[:2]:
        pieces[:] = [x.to(dtype) for x, dtype in zip(pieces, DTYPES, strict=True)]
    check(*cut, NUMBERS)


def test_all_zero(path):
    w, g, m, v = ([torch.zeros(B + 3)] for _ in range(4))
    check(w, g, m, v, NUMBERS)
    assert not w[0].any()


def test_norms_of_a_piece_do_not_depend_on_the_others(path, make_pieces):
    rows = list(zip(*inputs(make_pieces, [2 * B + 7, 3, B]), strict=True))
    together = lamb_norms(*map(list, zip(*rows, strict=True)), NUMBERS)
    for i, row in enumerate(rows):
        assert torch.equal(together[:, i : i + 1], lamb_norms(*([x] for x in row), NUMBERS))


def test_foreach_is_taken_if_asked_for(path, make_pieces):
    check(*inputs(make_pieces, [50, 3]), NUMBERS, fused=False)


@pytest.mark.parametrize("size", [CACHED - 1, 2 * CACHED + 5])
def test_batches_of_the_torch_path(make_pieces, size):
    check(*inputs(make_pieces, [40, size, 3]), NUMBERS)


def test_messages(make_pieces):
    w, g, m, v = inputs(make_pieces, [4, 2])
    with pytest.raises(TypeError, match=r"seconds\[0\] must be one of torch.float32, got torch.float16"):
        lamb_norms(w, g, m, [x.half() for x in v], NUMBERS)
    with pytest.raises(ValueError, match=r"weights and firsts must have the same sizes, got \[4, 2\] and \[4\]"):
        lamb_step_(w, g, m[:1], v, torch.ones(2), NUMBERS)
    with pytest.raises(TypeError, match=r"scale must be float32 \[2\], got torch.float64 \[2\]"):
        lamb_step_(w, g, m, v, torch.ones(2).double(), NUMBERS)
