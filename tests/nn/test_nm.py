import copy
import pickle

import pytest
import torch
from torch import nn
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from lightning_sparse.nn import NM
from lightning_sparse.nn import nm as module
from lightning_sparse.nn.semi_structured import IN_MULTIPLE, OUT_MULTIPLE, misfit_of


def noise(*shape, dtype=torch.float64, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def kept(weight, n, m):
    """Each weight compared with its group by itself."""
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    for row, values in enumerate(weight.abs().tolist()):
        for at, value in enumerate(values):
            group = values[at // m * m : at // m * m + m]
            mask[row, at] = sum(other > value for other in group) < n
    return mask


def make(n=2, m=4, decay=None, dtype=torch.float64, shape=(6, 13)):
    torch.manual_seed(0)
    layer = NM(shape[1], shape[0], n=n, m=m, decay=decay, dtype=dtype)
    return layer, kept(layer.weight.detach(), n, m)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (2, 2)])
def test_gradcheck(n, m):
    layer, _ = make(n, m)

    def run(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

    assert torch.autograd.gradcheck(run, (noise(3, 13).requires_grad_(), layer.weight, layer.bias))


@pytest.mark.parametrize("decay", [None, 0.0, 0.3])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_gradients(rows, decay):
    """Without decay those of the masked layer; with it those of a dense one at the masked weight, plus decay."""
    layer, mask = make(decay=decay)
    dense = nn.Linear(13, 6, dtype=torch.float64)
    dense.load_state_dict(layer.state_dict())
    with torch.no_grad():
        dense.weight.mul_(mask)
    x, grad = noise(rows, 13), noise(rows, 6, seed=2)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = layer(ours), dense(theirs)
    torch.testing.assert_close(got, want)
    got.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)
    wanted = dense.weight.grad * mask if decay is None else dense.weight.grad + decay * layer.weight * ~mask
    torch.testing.assert_close(layer.weight.grad, wanted)


def test_decay_after_the_exchange_is_decay_in_the_backward():
    inside, _ = make(decay=0.3)
    after, _ = make(decay=0.0)
    after.add_decay_(0.3)
    for layer in (inside, after):
        layer(noise(4, 13)).square().sum().backward()
    after.add_decay_(0.3)
    torch.testing.assert_close(inside.weight.grad, after.weight.grad)


def test_all_kept_is_nn_linear():
    layer, _ = make(4, 4)
    dense = nn.Linear(13, 6, dtype=torch.float64)
    dense.load_state_dict(layer.state_dict())
    for module_ in (layer, dense):
        module_(noise(3, 13)).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, dense.weight.grad)
    assert torch.equal(layer.masked_weight(), dense.weight)


def test_dead_weights_revive_with_straight_through_gradients_only():
    """A target that needs the weights which begin dead."""
    target = torch.zeros(1, 8)
    target[0, [0, 1, 4, 5]] = 1.0
    alive = {}
    for decay in (None, 2e-4):
        layer = NM(8, 1, False, decay=decay)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[0.0, 0.0, 0.2, 0.2] * 2]))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        for seed in range(60):
            x = noise(16, 8, dtype=torch.float32, seed=seed)
            optimizer.zero_grad()
            (layer(x) - x @ target.t()).square().mean().backward()
            optimizer.step()
        alive[decay] = layer.masked_weight()[0].nonzero().view(-1).tolist()
    assert alive[2e-4] == [0, 1, 4, 5]
    assert alive[None] == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"n": 1}, "pattern 1:4 is not 2:4"),
        ({"capability": (7, 5)}, "needs an NVIDIA GPU of compute capability 8.0 or more"),
        ({"capability": (0, 0)}, "needs an NVIDIA GPU of compute capability 8.0 or more"),
        ({"dtype": torch.float32}, "torch.float32 is neither float16 nor bfloat16"),
        ({"out_features": 48}, "48 x 128 is no multiple of 32 x 64"),
        ({"in_features": 96}, "64 x 96 is no multiple of 32 x 64"),
        ({"rows": 0}, "no rows"),
    ],
)
def test_shape_gate(change, reason):
    fitting = {"capability": (9, 0), "dtype": torch.bfloat16, "rows": 1, "out_features": 64, "in_features": 128}
    assert misfit_of(**({"n": 2, "m": 4} | fitting | change)) == reason


def test_the_gate_is_inside_of_torchs_own():
    for dtype in (torch.float16, torch.bfloat16):
        for backend in (torch.sparse.SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS):
            own = backend._DTYPE_SHAPE_CONSTRAINTS[dtype]
            assert OUT_MULTIPLE % own.sparse_min_rows == 0
            assert IN_MULTIPLE % own.sparse_min_cols == 0


def test_torch_takes_the_weight_as_2_4():
    layer, _ = make(dtype=torch.float16, shape=(64, 128))
    pruned = layer.masked_weight()
    packed, meta = sparse_semi_structured_from_dense_cutlass(pruned)
    assert packed.shape == (64, 64)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(packed, meta), pruned)


@pytest.fixture
def gpu(monkeypatch):
    """The gate says yes, and what would run on the GPU is counted, and multiplied here."""
    calls = []

    def product(x, pruned, bias):
        calls.append(x.shape[0])
        return nn.functional.linear(x, pruned, bias)

    monkeypatch.setattr(module, "misfit", lambda *_: None)
    monkeypatch.setattr(module, "semi_structured_linear", product)
    monkeypatch.setattr(module, "_failed", set())
    return calls


@pytest.mark.parametrize(("gained", "used"), [(0.5, True), (0.0, False)])
def test_semi_structured_path(gpu, monkeypatch, gained, used):
    monkeypatch.setattr(module, "crossover", lambda *_, **__: module.Crossover(gained))
    layer, mask = make(shape=(6, 16))
    y = layer(noise(3, 16))
    y.sum().backward()
    torch.testing.assert_close(y, noise(3, 16) @ (layer.weight * mask).t() + layer.bias)
    torch.testing.assert_close(layer.weight.grad, noise(3, 16).sum(0).expand(6, 16) * mask)
    assert gpu == ([3] if used else [])
    assert layer.work.forward.skipped == (3 * 48 if used else 0)
    assert layer.work.forward.done == 3 * (48 if used else 96)


def test_kernels_that_refuse_are_not_asked_again(gpu, monkeypatch, caplog):
    def refuse(*_, **__):
        gpu.append(0)
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(module, "crossover", refuse)
    layer, _ = make(shape=(6, 16))
    for _ in range(2):
        layer(noise(3, 16))
    assert gpu == [0]
    assert caplog.text.count("no kernel image") == 1


def test_crossover_is_measured_by_running_both(gpu):
    layer, _ = make(shape=(6, 16))
    found = layer._crossover(noise(3, 16))
    assert gpu
    assert set(gpu) == {4}
    assert found.density in (0.0, 0.5)


def test_copies_and_checkpoints():
    layer, _ = make(decay=0.1)
    x = noise(3, 13)
    other = NM(13, 6, decay=0.1, dtype=torch.float64)
    other.load_state_dict(nn.Linear(13, 6, dtype=torch.float64).state_dict() | layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), NM.from_linear(layer)):
        assert torch.equal(twin(x), layer(x))


def test_autocast_and_compile():
    layer, _ = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(noise(3, 13, dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    x = noise(2, 3, 13, dtype=torch.float32)
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))


def test_messages():
    for options, message in (
        ({"m": 3}, r"NM: m must be one of \(2, 4, 8, 16\), got 3"),
        ({"n": 5}, r"NM: n must be in \[1, 4\], got 5"),
        ({"decay": -1}, "NM: decay must be at least 0, or None, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            NM(8, 8, **options)
    with pytest.raises(ValueError, match=r"NM: expected input \[\*, 13\], got \[2, 12\]"):
        make()[0](noise(2, 12))
