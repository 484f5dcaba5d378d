"""LARS and LAMB against formulas in float64, torch's own optimizers and others' implementations."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from lightning_sparse.arguments import is_linear
from lightning_sparse.communicators import ProcessGroup, VirtualRanks
from lightning_sparse.kernels.path import interpret
from lightning_sparse.optim import LAMB, LARS, PTO
from lightning_sparse.optim.operators import deal

SHAPES = [(7, 5), (11,), (3, 2, 2, 3), (1, 1), (64, 40), ()]
STEPS = 100


def problem(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Of a quadratic bowl with noise, the same for equal parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    noise = [torch.randn(p.shape, generator=generator) for p in parameters]
    return [(p.detach().float() + x).to(p.dtype) for p, x in zip(parameters, noise, strict=True)]


def train(make: Callable[[list[nn.Parameter]], Any], steps: int = STEPS, dtype: Any = torch.float32) -> list[Tensor]:
    parameters = problem(dtype=dtype)
    optimizer = make(parameters)
    for step in range(steps):
        for p, g in zip(parameters, gradients(step, parameters), strict=True):
            p.grad = g
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.99
        optimizer.step()
    return [p.detach() for p in parameters]


def close(left: list[Tensor], right: list[Tensor], rtol: float = 2e-5) -> None:
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=rtol, atol=rtol)


class Formula:
    """What the docstrings say, in float64, one parameter at a time."""

    def __init__(self, name: str, parameters: list[nn.Parameter], **options: Any) -> None:
        self.name, self.parameters = name, parameters
        self.param_groups = [options]
        self.state: list[dict[str, Tensor]] = [
            {"w": p.detach().double(), "m": torch.zeros(p.shape).double(), "v": torch.zeros(p.shape).double()}
            for p in parameters
        ]
        self.t = 0

    def step(self) -> None:
        o = self.param_groups[0]
        self.t += 1
        for p, s in zip(self.parameters, self.state, strict=True):
            g, w = p.grad.double(), s["w"]
            adapt = p.ndim >= o.get("min_ndim", 2)
            decay = o.get("weight_decay", 0.0) if adapt else 0.0
            norm_w = float(w.norm())
            if self.name == "lars":
                norm_g = float(g.norm())
                trust = 0.001 * norm_w / (norm_g + decay * norm_w) if adapt and norm_w and norm_g else 1.0
                u = trust * (g + decay * w)
                s["v"] = o.get("momentum", 0.9) * s["v"] + u
                nesterov = u + o.get("momentum", 0.9) * s["v"]
                s["w"] = w - o["lr"] * (nesterov if o.get("nesterov") else s["v"])
            else:
                b1, b2 = o.get("betas", (0.9, 0.999))
                s["m"], s["v"] = b1 * s["m"] + (1 - b1) * g, b2 * s["v"] + (1 - b2) * g * g
                m, v = s["m"], s["v"]
                if o.get("bias_correction", True):
                    m, v = m / (1 - b1**self.t), v / (1 - b2**self.t)
                u = m / (v.sqrt() + 1e-6) + decay * w
                low, high = o.get("norm_bounds", (0.0, math.inf))
                norm_u = float(u.norm())
                trust = min(max(norm_w, low), high) / norm_u if adapt and norm_w and norm_u else 1.0
                s["w"] = w - o["lr"] * trust * u
            p.data.copy_(s["w"])


OPTIONS: dict[str, tuple[type, dict[str, Any]]] = {
    "lars": (LARS, {"lr": 2.0}),
    "lars decay": (LARS, {"lr": 2.0, "weight_decay": 0.1, "momentum": 0.5}),
    "lars nesterov all": (LARS, {"lr": 2.0, "weight_decay": 0.01, "nesterov": True, "min_ndim": 0}),
    "lars no momentum": (LARS, {"lr": 2.0, "momentum": 0.0}),
    "lamb": (LAMB, {"lr": 0.02}),
    "lamb decay": (LAMB, {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "lamb raw all": (LAMB, {"lr": 0.02, "weight_decay": 0.01, "bias_correction": False, "min_ndim": 0}),
    "lamb bounds": (LAMB, {"lr": 0.02, "norm_bounds": (1.5, 4.0)}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_formula(name: str) -> None:
    kind, options = OPTIONS[name]
    want = train(lambda p: Formula(name[:4], p, **options))
    close(train(lambda p: kind(p, **options)), want)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_equals_pytorch_optimizer(nesterov: bool) -> None:
    options = {"lr": 2.0, "weight_decay": 0.05, "momentum": 0.9, "trust_coefficient": 0.01, "nesterov": nesterov}
    close(train(lambda p: LARS(p, **options)), train(lambda p: pytorch_optimizer.LARS(p, **options)))


def test_lamb_equals_pytorch_optimizer_without_bias_correction() -> None:
    # there weights above norm 10 count as 10, nothing is excluded, and eps is added to the norm of the update too;
    # adam_debias keeps a correction of the first moment out of the learning rate
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}
    ours = train(lambda p: LAMB(p, **options, bias_correction=False, norm_bounds=(0.0, 10.0), min_ndim=0))
    close(ours, train(lambda p: pytorch_optimizer.Lamb(p, **options, weight_decouple=False, adam_debias=True)))


def test_excluded_parameters_are_stepped_as_torch_does() -> None:
    lars = train(lambda p: LARS(p, lr=0.05, weight_decay=0.1, min_ndim=9))
    close(lars, train(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)))
    lamb = train(lambda p: LAMB(p, lr=0.05, weight_decay=0.1, eps=1e-8, min_ndim=9))
    close(lamb, train(lambda p: torch.optim.Adam(p, lr=0.05)))


def test_a_layer_moves_by_its_own_length() -> None:
    for scale in (1e-3, 1.0, 1e3):
        weight = nn.Parameter(torch.full((2, 8), scale))
        weight.grad = torch.full((2, 8), 7.0)
        LARS([weight], lr=1.0, trust_coefficient=0.5).step()
        torch.testing.assert_close(weight.detach(), torch.full((2, 8), 0.5 * scale))
        weight = nn.Parameter(torch.full((2, 8), scale))
        weight.grad = torch.full((2, 8), -7.0)
        LAMB([weight], lr=0.25).step()
        torch.testing.assert_close(weight.detach(), torch.full((2, 8), 1.25 * scale))


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize("fused", ["interpreter", "torch"])
def test_zero_norms_have_trust_ratio_one(kind: Any, fused: str) -> None:
    parameters = [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4, 4))]
    for p, g in zip(parameters, (1.0, 0.0, 0.0), strict=True):
        p.grad = torch.full((4, 4), g)
    optimizer = kind(parameters, lr=0.5, eps=0.0) if kind is LAMB else kind(parameters, lr=0.5)
    if kind is LAMB:
        # 0 / 0 is not a number in any Adam without eps
        optimizer.param_groups[0]["eps"] = 1e-6
    if fused == "interpreter":
        with interpret():
            optimizer.step()
    else:
        optimizer.step()
    assert parameters[0].allclose(torch.tensor(-0.5))
    assert parameters[1].equal(torch.ones(4, 4))
    assert parameters[2].equal(torch.zeros(4, 4))


@pytest.mark.parametrize("name", ["lars decay", "lars nesterov all", "lamb decay"])
def test_fused_equals_foreach(name: str) -> None:
    kind, options = OPTIONS[name]
    with interpret():
        fused = train(lambda p: kind(p, **options), steps=8)
        foreach = train(lambda p: kind(p, **options, fused=False), steps=8)
    close(fused, foreach, rtol=2e-6)
    close(foreach, train(lambda p: kind(p, **options), steps=8), rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_half_precision_sums_in_float32(kind: Any, dtype: torch.dtype) -> None:
    # 300 squares of 300 overflow float16, and a sum of 90000 equal squares stops growing in bfloat16
    weight = nn.Parameter(torch.full((300, 300), 300.0).to(dtype))
    weight.grad = torch.full((300, 300), 2.0**-12).to(dtype)
    kind([weight], lr=0.5, **({"trust_coefficient": 1.0} if kind is LARS else {"eps": 0.0})).step()
    torch.testing.assert_close(weight.detach().float(), torch.full((300, 300), 150.0), rtol=4e-3, atol=0)
    optimizer = kind([weight], lr=1e-3)
    for _ in range(3):
        optimizer.step()
    assert all(x.dtype == torch.float32 for x in optimizer.state[weight].values() if isinstance(x, Tensor))


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(kind: Any, dtype: torch.dtype) -> None:
    def run(optimizer: Any, parameters: list[nn.Parameter], steps: range) -> None:
        for step in steps:
            for p, g in zip(parameters, gradients(step, parameters), strict=True):
                p.grad = g
            optimizer.step()

    whole = problem(dtype=dtype)
    first = kind([{"params": whole[:2], "lr": 0.02}, {"params": whole[2:]}], lr=0.01, weight_decay=0.1)
    run(first, whole, range(5))
    parts = [nn.Parameter(p.detach().clone()) for p in whole]
    second = kind([{"params": parts[:2]}, {"params": parts[2:]}], lr=9.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(first, whole, range(5, 9))
    run(second, parts, range(5, 9))
    assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_copy_steps_as_the_original(kind: Any) -> None:
    optimizer = kind(problem(), lr=0.1)
    other = copy.deepcopy(optimizer)
    for x in (optimizer, other):
        parameters = x.param_groups[0]["params"]
        for p, g in zip(parameters, gradients(0, parameters), strict=True):
            p.grad = g
        x.step()
    pairs = zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_copy_keeps_who_computes_and_how(kind: Any, duplicate: Any) -> None:
    operator = PTO(ProcessGroup.__new__(ProcessGroup))
    other = duplicate(kind(problem(), lr=0.1, operator=operator, fused=False))
    assert isinstance(other.operator, PTO)
    assert other.operator._transport is None  # of its own, when it is called
    assert other._fused is False


def test_copies_share_the_transport_that_they_were_given() -> None:
    def rank(transport: Any) -> bool:
        return copy.deepcopy(LARS(problem(), lr=0.1, operator=PTO(transport))).operator._transport is transport

    assert VirtualRanks(2).run(rank) == [True, True]


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_layouts_unused_parameters_and_closures(kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 4, 4, 6, 5, generator=generator)
    plain, last = nn.Parameter(x.clone()), nn.Parameter(x.clone().contiguous(memory_format=torch.channels_last))
    unused, empty = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.zeros(0, 3))
    optimizer = kind([plain, last, unused, empty], lr=0.1, weight_decay=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (plain * g).sum() + (last * g).sum() + empty.sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    torch.testing.assert_close(plain.detach(), last.detach(), rtol=1e-5, atol=1e-6)
    assert unused.equal(torch.ones(3, 3))
    assert not optimizer.state[unused]


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_memory_format_that_changes_changes_nothing(kind: Any) -> None:
    x, *steps = torch.randn(7, 4, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    plain, changing = nn.Conv2d(4, 4, (3, 2), bias=False), nn.Conv2d(4, 4, (3, 2), bias=False)
    optimizers = []
    for layer in (plain, changing):
        layer.weight.data.copy_(x)
        optimizers.append(kind([layer.weight], lr=0.1))
    formats = [torch.contiguous_format, *2 * [torch.channels_last], *3 * [torch.contiguous_format]]
    for g, memory_format in zip(steps, formats, strict=True):
        changing.to(memory_format=memory_format)
        for layer, optimizer in zip((plain, changing), optimizers, strict=True):
            layer.weight.grad = g.clone()
            optimizer.step()
        torch.testing.assert_close(changing.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_groups_have_options_of_their_own() -> None:
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([{"params": [a], "trust_coefficient": 0.5}, {"params": [b], "lr": 0.25}], lr=1.0)
    a.grad, b.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(a.detach(), torch.full((2, 2), 0.5))
    torch.testing.assert_close(b.detach(), torch.full((2, 2), 1 - 0.25 * 0.001))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LARS(p, lr=-1.0), "LARS: lr must be at least 0, got -1.0"),
        (lambda p: LARS(p, lr=1.0, momentum=1.0), r"LARS: momentum must be in \[0, 1\), got 1.0"),
        (lambda p: LARS(p, lr=1.0, trust_coefficient=0), "LARS: trust_coefficient must be above 0, got 0"),
        (lambda p: LAMB(p, lr=1.0, betas=(0.9, 1.0)), r"LAMB: betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        (lambda p: LAMB(p, lr=1.0, weight_decay=-0.1), "LAMB: weight_decay must be at least 0, got -0.1"),
        (lambda p: LAMB(p, lr=1.0, norm_bounds=(2.0, 1.0)), "LAMB: norm_bounds must be ascending and at least 0"),
        (lambda p: LAMB(p, lr=1.0, min_ndim=True), "LAMB: min_ndim must be an integer of at least 0, got True"),
    ],
)
def test_options_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(problem())


def test_types_of_parameters_and_gradients_are_checked() -> None:
    with pytest.raises(TypeError, match=r"LARS: parameters must be float32, .*, got torch\.float64"):
        LARS([nn.Parameter(torch.ones(2).double())], lr=1.0)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"layer-wise optimizers need dense gradients, got torch\.sparse_coo"):
        LAMB(embedding.parameters(), lr=1.0).step()


def test_neither_is_linear_in_the_gradient() -> None:
    assert not is_linear(LARS(problem(), lr=1.0))
    assert not is_linear(LAMB(problem(), lr=1.0))


class TestPTO:
    def test_layers_are_dealt_evenly(self) -> None:
        numels = [100, 1, 50, 50, 3, 97, 0]
        for world in range(1, 9):
            shares = deal(numels, world)
            assert sorted(layer for share in shares for layer in share) == list(range(7))
            assert max(sum(numels[i] for i in share) for share in shares) <= sum(numels) / world + 100

    def test_alone_it_is_serial(self) -> None:
        options = {"lr": 0.5, "weight_decay": 0.1}
        operator = PTO()
        assert all(
            map(
                torch.equal,
                train(lambda p: LARS(p, **options, operator=operator), 5),
                train(lambda p: LARS(p, **options), 5),
            )
        )
        assert operator.elements == 5 * (35 + 36 + 1 + 2560)
