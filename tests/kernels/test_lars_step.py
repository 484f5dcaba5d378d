import pytest
import torch

from lightning_sparse.kernels import lars_step as module
from lightning_sparse.kernels.lars_step import lars_step_
from lightning_sparse.kernels.weights import CACHED, batches

B = module.BLOCK
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [B - 1], [B], [B + 1], [5003], [B, 0, 3, B + 1, 1]]
OPTIONS = [(0.1, 0.01, 0.9, False), (0.3, 0.2, 0.7, True), (1.0, 0.0, 0.0, False)]


def expected(weights, gradients, velocities, trust, lr, decay, momentum, nesterov):
    """One operation at a time, each rounded to fp32."""
    out = []
    for w, g, v, ratio in zip(weights, gradients, velocities, trust, strict=True):
        wide = w.to(torch.float32)
        update = ratio * (g.to(torch.float32) + wide * decay)
        v = momentum * v + update
        step = update + momentum * v if nesterov else v
        out.append(((wide - lr * step).to(w.dtype), v))
    return out


def check(weights, gradients, velocities, options, fused=True):
    trust = torch.linspace(0.3, 2.0, len(weights))
    want = expected(weights, gradients, velocities, trust, *options)
    kept = [g.clone() for g in gradients]
    lars_step_(weights, gradients, velocities, trust, *options, fused=fused)
    for w, v, (want_w, want_v) in zip(weights, velocities, want, strict=True):
        assert torch.equal(w, want_w)
        assert torch.equal(v, want_v)
    assert all(map(torch.equal, gradients, kept))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(path, make_pieces, sizes, dtype):
    check(make_pieces(sizes, dtype), make_pieces(sizes, dtype, 1), make_pieces(sizes, seed=2), OPTIONS[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(path, make_pieces, options, dtype):
    sizes = [700, 0, 9]
    check(make_pieces(sizes, dtype), make_pieces(sizes, dtype, 1), make_pieces(sizes, seed=2), options)


def test_mixed_dtypes_and_unaligned_views(path, make_pieces):
    def cut(seed):
        return [x.to(kind)[3:] for x, kind in zip(make_pieces([B + 5, 90, 70], seed=seed), DTYPES, strict=True)]

    check(cut(0), cut(1), [x[3:] for x in make_pieces([B + 5, 90, 70], seed=2)], OPTIONS[1])


def test_neighbours_are_left_alone(path):
    around = [torch.full((B + 9,), 7.0) for _ in range(2)]
    lars_step_([around[0][4:-4]], [torch.ones(B + 1)], [around[1][4:-4]], torch.ones(1), 0.5, 0.0, 0.0, False)
    for x in around:
        assert torch.equal(x[:4], torch.full((4,), 7.0))
        assert torch.equal(x[-4:], torch.full((4,), 7.0))


def test_foreach_is_taken_if_asked_for(path, make_pieces):
    check(make_pieces([50, 3]), make_pieces([50, 3], seed=1), make_pieces([50, 3], seed=2), OPTIONS[1], fused=False)


@pytest.mark.parametrize("size", [CACHED - 1, CACHED, 2 * CACHED + 5])
def test_batches_of_the_torch_path(make_pieces, size):
    sizes = [40, size, 3, 9]
    check(make_pieces(sizes), make_pieces(sizes, seed=1), make_pieces(sizes, seed=2), OPTIONS[0])


def test_batches_cover_every_entry_once():
    sizes = [5, 0, CACHED, CACHED + 1, 7, CACHED - 6, 30]
    pieces = [torch.zeros(size) for size in sizes]
    found = list(batches(pieces))
    assert all(0 < sum(end - begin for _, begin, end in batch) <= CACHED for batch in found)
    for batch in found:
        for piece, begin, end in batch:
            pieces[piece][begin:end] += 1
    assert all(piece.eq(1).all() for piece in pieces)
    assert [cut for batch in found for cut in batch] == sorted(cut for batch in found for cut in batch)


def test_messages(make_pieces):
    w, g, v = (make_pieces([4, 2], seed=seed) for seed in range(3))
    trust = torch.ones(2)
    numbers = 0.1, 0.0, 0.9, False
    with pytest.raises(ValueError, match="weights and gradients must have the same sizes and dtypes"):
        lars_step_(w, [x.half() for x in g], v, trust, *numbers)
    with pytest.raises(ValueError, match=r"weights and velocities must have the same sizes, got \[4, 2\] and \[4\]"):
        lars_step_(w, g, v[:1], trust, *numbers)
    with pytest.raises(TypeError, match=r"velocities\[0\] must be one of torch.float32, got torch.float16"):
        lars_step_(w, g, [x.half() for x in v], trust, *numbers)
    with pytest.raises(TypeError, match=r"trust must be float32 \[2\], got torch.float32 \[3\]"):
        lars_step_(w, g, v, torch.ones(3), *numbers)
    with pytest.raises(ValueError, match=r"gradients\[0\] must be 1-D and contiguous, got shape \(2, 2\)"):
        lars_step_(w, [g[0].view(2, 2), g[1]], v, trust, *numbers)
