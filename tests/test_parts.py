"""Small parts with hand-checkable numbers: vectors, draws, schedules, memories, flat views."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from lightning_sparse.accumulator import MomentumSum, Vectors
from lightning_sparse.codecs import Quantized, Raw
from lightning_sparse.communicators import AllGather, CompressedAllReduce, VirtualRanks
from lightning_sparse.communicators.volume import ring_bytes
from lightning_sparse.compressors import TopK, WeightBlocks
from lightning_sparse.finite import are_finite, is_usable, peak_of
from lightning_sparse.job import Job
from lightning_sparse.memory import MomentumResidual, Residual
from lightning_sparse.protocols import Transport
from lightning_sparse.random import Draw
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant, cycle, exponential_warmup, piecewise
from lightning_sparse.sync import Updates
from lightning_sparse.sync.flat import flat_view, is_small
from lightning_sparse.sync.lent_rates import LentRates
from lightning_sparse.sync.steps import Steps
from lightning_sparse.sync.stretch import Stretch
from lightning_sparse.sync.updates_tap import UpdatesTap
from lightning_sparse.vector import SparseVector, concatenate

ROOT = Path(__file__).parents[1]


def test_package_list_matches_the_folders() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "lightning_sparse").glob("**/__init__.py")
    }
    assert set(config["tool"]["setuptools"]["packages"]) == found | {"lightning_sparse.kernels"}


def test_concatenate_shifts_and_moves_padding_back() -> None:
    a = SparseVector(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1, 4, 0], dtype=torch.int32), 5)
    b = SparseVector(torch.tensor([3.0, 0.0]), torch.tensor([0, 0], dtype=torch.int32), 2)
    joined = concatenate([a, b])
    assert joined.values.tolist() == [1, 2, 3, 0, 0]
    assert joined.indices.tolist() == [1, 4, 5, 0, 0]
    assert joined.numel == 7
    assert joined.dense().tolist() == [0, 1, 0, 0, 2, 3, 0]


def test_draws_are_pinned_and_spread() -> None:
    """The numbers are part of the format: other values would change which entries old runs sent."""
    assert Draw(0, 0, "a").bits(3).tolist() == [int(x) for x in Draw(0, 0, "a").bits(5)[:3]]
    assert Draw(7, 3, "layer.weight").bits(2).tolist() == PINNED
    assert [Draw(7, 3, "layer.weight").word(position) for position in range(2)] == PINNED
    draws = torch.stack([Draw(0, step, "a").bits(1000).double() for step in range(50)]) / 2**32
    assert abs(float(draws.mean()) - 0.5) < 0.01
    assert abs(float(draws.var()) - 1 / 12) < 0.01
    assert Draw(0, 1, "a").below(10**12) != Draw(0, 2, "a").below(10**12)
    with pytest.raises(ValueError, match="high must be at least 1, got 0"):
        Draw(0, 0, "a").below(0)


PINNED = [1688984908, 564069390]


def test_schedules() -> None:
    assert constant(0.5)(10) == 0.5
    warm = exponential_warmup(0.01, 2, start=0.25)
    assert [round(warm(step), 4) for step in range(4)] == [0.25, 0.05, 0.01, 0.01]
    steps = piecewise({0: 1.0, 3: 0.1})
    assert [steps(step) for step in range(5)] == [1, 1, 1, 0.1, 0.1]
    assert [cycle(1.0, 0.5, 0.2)(step) for step in range(5)] == [1, 0.5, 0.2, 1, 0.5]
    with pytest.raises(ValueError, match="cycle: expected at least one value, got none"):
        cycle()


def test_residual_by_hand() -> None:
    memory = Residual()
    accumulator = memory.accumulate(["w"], [torch.tensor([1.0, -3.0, 2.0])])
    sent = TopK().compress(accumulator, 1, Draw(0, 0, "w"))
    memory.discard(["w"], sent)
    assert sent.values.tolist() == [-3]
    assert memory.state_dict()["residual"]["w"].tolist() == [1, 0, 2]
    assert memory.norm() == pytest.approx(5**0.5)
    assert memory.accumulate(["w"], [torch.ones(3)]).pieces()[0].tolist() == [2, 1, 3]


def test_momentum_residual_by_hand() -> None:
    """u = 0.5 u + g, v += u; the sent entry loses both."""
    memory = MomentumResidual(0.5)
    for gradient, values in ((torch.tensor([1.0, 4.0]), [4.0]), (torch.tensor([1.0, 1.0]), [2.5])):
        sent = TopK().compress(memory.accumulate(["w"], [gradient]), 1, Draw(0, 0, "w"))
        memory.discard(["w"], sent)
        assert sent.values.tolist() == values
    # step 1: u = v = [1, 4], the 4 leaves; step 2: u = [1.5, 1], v = [2.5, 1], the 2.5 leaves
    state = memory.state_dict()
    assert state["velocity"]["w"].tolist() == [0, 1]
    assert state["residual"]["w"].tolist() == [0, 1]
    assert memory.dense(["b"], [torch.tensor([2.0])])[0].tolist() == [2]
    assert memory.dense(["b"], [torch.tensor([2.0])])[0].tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("read", ["pieces", "select", "block"])
def test_momentum_sum_samples_what_it_will_hold(read: str, scale: float, dtype: torch.dtype) -> None:
    """u = m u + s g, v += u once, whatever reads first; a sample sees the new v before, and the same after."""
    generator = torch.Generator().manual_seed(0)
    gradients, velocities, residuals = (
        [torch.randn(size, generator=generator) for size in (5000, 0, 77)] for _ in range(3)
    )
    gradients = [g.to(dtype) for g in gradients]
    moved = [v * 0.9 + g.float() * scale for v, g in zip(velocities, gradients, strict=True)]
    sums = [r + v for r, v in zip(residuals, moved, strict=True)]
    total, draw = MomentumSum(gradients, velocities, residuals, 0.9, scale), Draw(0, 0, "w")
    expected = Vectors(sums).sample(900, draw)
    for _ in range(2):
        assert torch.equal(total.sample(900, draw), expected)
        if read == "select":
            found, count = total.select(torch.tensor(2.5), 5077, 0)
            want = torch.where(torch.cat(sums).abs() >= 2.5, torch.cat(sums), 0.0)
            assert int(count) == want.count_nonzero()
            assert torch.equal(found.dense(), want)
        elif read == "block":
            assert torch.equal(total.block(4990, 20), torch.cat(sums)[4990:5010])
        else:
            assert all(torch.equal(x, y) for x, y in zip(total.pieces(), sums, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(velocities, moved, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(residuals, sums, strict=True))


def test_a_sample_of_pieces_is_one_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    for sizes in ([7], [0, 0, 3, 0], [1] * 50, [64, 0, 5000, 1, 1, 300, 0], [2, 90_000, 2]):
        x = torch.rand(sum(sizes), generator=generator)
        for size in (1, 2, x.numel() // 2 + 1, x.numel(), 2 * x.numel()):
            draw = Draw(0, size, "w")
            at = ((torch.arange(size).double() + draw.bits(size) / 2**32) * (x.numel() / size)).long()
            assert torch.equal(Vectors(x.split(sizes)).sample(size, draw), x[at.clamp(max=x.numel() - 1)])


def test_momentum_sum_splits_into_its_pieces() -> None:
    velocities, residuals = [torch.ones(2), torch.ones(1)], [torch.zeros(2), torch.ones(1)]
    parts = MomentumSum([torch.ones(2), torch.ones(1)], velocities, residuals, 0.5, 2.0).split()
    assert [part.pieces()[0].tolist() for part in parts] == [[2.5, 2.5], [3.5]]
    assert [v.tolist() for v in velocities] == [[2.5, 2.5], [2.5]]


def test_momentum_residual_gets_velocity_back_with_entries() -> None:
    memory = MomentumResidual(0.5)
    sent = TopK().compress(memory.accumulate(["w"], [torch.tensor([1.0, 4.0, 3.0])]), 2, Draw(0, 0, "w"))
    memory.discard(["w"], sent)
    memory.give_back(["w"], SparseVector(torch.tensor([3.0]), torch.tensor([2], dtype=torch.int32), 3))
    assert memory.state_dict()["velocity"]["w"].tolist() == [1, 0, 3]
    assert memory.state_dict()["residual"]["w"].tolist() == [1, 0, 3]


def test_momentum_residual_clips_all_that_came_in_together() -> None:
    """[3] and [4] have norm 5 together: both shrink to a fifth, also where one of them travels densely."""
    memory = MomentumResidual(0.0, clip=1.0)
    sparse, dense = torch.tensor([3.0]), torch.tensor([4.0])
    memory.begin([sparse, dense], 4.0)
    pieces = memory.accumulate(["a"], [sparse]).pieces() + memory.dense(["b"], [dense])
    torch.testing.assert_close(torch.cat(pieces), torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1.0, 10.0, 1e4, 1e30])
@pytest.mark.parametrize("memory", [Residual(), MomentumResidual(0.5), MomentumResidual(0.5, 1.0)])
def test_a_refused_step_leaves_the_memory_as_it_was(memory: Residual, size: float) -> None:
    """Exactly where the gradient is out of the ordinary, to its rounding otherwise; whatever was sent meanwhile."""
    memory, generator = copy.deepcopy(memory), torch.Generator().manual_seed(0)

    def step(size: float, refused: bool) -> None:
        a, b, c = (size * torch.randn(n, generator=generator) for n in (5, 4, 3))
        memory.begin([a, b, c], peak_of([a, b, c]))
        sent = TopK().compress(memory.accumulate(["a", "b"], [a, b]), 3, Draw(0, 0, "w"))
        memory.discard(["a", "b"], sent)
        memory.dense(["c"], [c])
        if refused:
            memory.give_back(["a", "b"], sent)
            memory.undo(["a", "b", "c"], [a, b, c])

    for _ in range(3):
        step(1.0, refused=False)
    before = {kind: {name: x.clone() for name, x in part.items()} for kind, part in memory.state_dict().items()}
    for _ in range(2):
        step(size, refused=True)
        exact = size > 100
        torch.testing.assert_close(memory.state_dict(), before, rtol=0, atol=0 if exact else 1e-6 * size)


def test_what_would_soon_overflow_is_no_gradient() -> None:
    usable = [is_usable(peak_of([torch.tensor([x, -1.0])])) for x in (1e36, -1e37, torch.inf, torch.nan)]
    assert usable == [True, False, False, False]
    # a sum of these would overflow, and float16 would not hold it
    assert are_finite([torch.full((1000,), 6e4, dtype=torch.float16), torch.full((10,), 1e36), torch.empty(0)])
    assert not are_finite([torch.tensor([1.0, torch.nan]).to_sparse()])
    assert are_finite([torch.tensor([1 + 2j])])
    assert peak_of([torch.tensor([-3.0, 2.0]), torch.tensor([1], dtype=torch.int64)]) == 3


@pytest.mark.parametrize("capacity", [1, 300, 700, 50_000, 100_000])
def test_top_k_fills_up_with_equal_entries(capacity: int) -> None:
    """Above all, the 500 infinities; then 99 000 equal entries; then none, for zero and NaN never leave."""
    x = torch.full((99_900,), 0.5)
    x[100:600], x[1000:1100], x[2000:2300] = -torch.inf, 0.0, torch.nan
    sent = TopK().compress(Vectors([x[:70_000], x[70_000:]]), capacity, Draw(0, 0, "w"))
    live = sent.values != 0
    indices = sent.indices[live].long()
    assert sent.capacity == capacity
    assert live.sum() == min(capacity, 99_500)
    assert live[: indices.numel()].all()
    assert (indices.diff() > 0).all()
    assert torch.equal(sent.values[live], x[indices])
    assert sent.values.isinf().sum() == min(capacity, 500)


def test_flat_view_shares_memory() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (torch.randn(3, 4), image, torch.randn(4, 3).T, torch.zeros(()), torch.zeros(0, 3)):
        view = flat_view(tensor)
        assert view.shape == (tensor.numel(),)
        view.fill_(7)
        assert (tensor == 7).all()
    with pytest.raises(ValueError, match="without gaps in memory"):
        flat_view(torch.randn(4, 6)[:, :3])


def test_small_parameters() -> None:
    assert is_small(torch.zeros(5000), 1024)
    assert is_small(torch.zeros(10, 10), 1024)
    assert not is_small(torch.zeros(32, 32), 1024)


def test_ring_bytes() -> None:
    """Each of 4 ranks sends and receives 2 * 3/4 of the buffer."""
    assert ring_bytes(1000, 4) == 3000
    assert ring_bytes(1000, 1) == 0


def run_steps(
    transport: Transport,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int, int], Tensor],
    steps: int,
    config: Updates | None = None,
) -> UpdatesTap:
    """Steps with ``gradient(rank, step)`` in every weight."""
    module = nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
    tap = make_tap(transport, optimizer, module, config)
    told = Steps(tap, [optimizer])
    for step in range(steps):
        for p in module:
            p.grad = gradient(transport.rank, step).expand(p.shape).clone()
        optimizer.step()
    told.close()
    return tap


def noise(rank: int, step: int) -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (lambda rank, step: noise(0, step), 1.0),
        # noise alone: its mean over 4 ranks is half as large
        (noise, 2.0),
        # signal and noise of equal power: |mean|^2 / |each|^2 = (1 + 1 / 4) / 2
        (lambda rank, step: noise(9, step) + noise(rank, step), 0.625**-0.5),
    ],
)
def test_agreement_gives_back_the_length_that_averaging_takes(
    gradient: Callable[[int, int], Tensor], expected: float
) -> None:
    """With SGD without momentum a step is the gradient, so the factor has a closed form; the same on all ranks."""

    def task(transport: Transport) -> list[float]:
        weight = nn.Parameter(torch.zeros(64, 64))
        tap = run_steps(transport, torch.optim.SGD([weight], lr=0.01), gradient, 60)
        return list(tap.lr_scales().values())

    for factors in VirtualRanks(4).run(task):
        assert factors == [pytest.approx(expected, rel=0.05)]
        assert factors[0] <= 2


def test_agreement_ignores_weights_that_nobody_moves_and_is_1_at_first() -> None:
    def task(transport: Transport) -> list[float]:
        moved, still = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))
        optimizer = torch.optim.SGD([{"params": [moved]}, {"params": [still], "lr": 0.0}], lr=0.01)
        factors = run_steps(transport, optimizer, noise, 1).lr_scales()
        return [*factors.values(), *run_steps(transport, optimizer, noise, 12).lr_scales().values()]

    for factors in VirtualRanks(4).run(task):
        assert factors == [1.0, 1.0, pytest.approx(2.0, rel=0.1), 1.0]


def test_agreement_follows_in_later_steps_and_forgets_on_restart() -> None:
    def task(transport: Transport) -> tuple[float, float, float]:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        # ranks agree for 20 steps, then not at all
        tap = run_steps(transport, optimizer, lambda rank, step: noise(rank * (step >= 20), step), 20)
        early = tap.lr_scales()["0"]
        tap = run_steps(transport, optimizer, lambda rank, step: noise(rank * (step >= 20), step), 400)
        late = tap.lr_scales()["0"]
        tap.restart()
        return early, late, tap.lr_scales()["0"]

    for early, late, restarted in VirtualRanks(4).run(task):
        assert early == 1
        assert late == pytest.approx(2, rel=0.1)
        assert restarted == 1


def test_agreement_measured_on_two_ranks_is_what_eight_begin_with() -> None:
    """Signal and noise of equal power: rho is 3/4 on two ranks, 9/16 on eight."""

    def task(transport: Transport, state: dict[str, Any] | None = None) -> Any:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        steps = 60 if state is None else 0
        tap = run_steps(transport, optimizer, lambda rank, step: noise(9, step) + noise(rank, step), steps)
        if state is not None:
            tap.load_shared_state(state)
        return tap.shared_state(), tap.lr_scales()["0"]

    state, measured = VirtualRanks(2).run(task)[0]
    assert measured == pytest.approx(0.75**-0.5, rel=0.05)
    for _, factor in VirtualRanks(8).run(lambda transport: task(transport, state)):
        assert factor == pytest.approx((9 / 16) ** -0.5, rel=0.05)
    for _, factor in VirtualRanks(2).run(lambda transport: task(transport, state)):
        assert factor == measured


def test_a_parameter_that_joins_while_a_measurement_is_in_flight() -> None:
    """Two measured steps in a row, the second with more parameters."""

    def task(transport: Transport) -> dict[str, float]:
        module = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(32, 64))])
        optimizer = torch.optim.SGD([module[0]], lr=0.01)
        tap = make_tap(transport, optimizer, module)
        Steps(tap, [optimizer])
        for step in range(9):
            if step == 3:
                optimizer.add_param_group({"params": [module[1]]})
            for position, p in enumerate(module):
                p.grad = noise(transport.rank, 10 * step + position)[: len(p)].clone()
            optimizer.step()
        return tap.lr_scales()

    for factors in VirtualRanks(4).run(task):
        assert factors == {"0": pytest.approx(2, rel=0.1), "1": pytest.approx(2, rel=0.1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda weights, lr: torch.optim.SGD(weights, lr=lr),
        lambda weights, lr: torch.optim.AdamW(weights, lr=torch.tensor(lr), foreach=False),
        lambda weights, lr: torch.optim.LBFGS(weights, lr=lr, max_iter=1),
    ],
    ids=["sgd", "adamw", "lbfgs"],
)
def test_lr_scale_is_a_factor_on_learning_rates(make: Any, dtype: torch.dtype) -> None:
    """One step at twice the rate, from a factor and from the rate itself, of any optimizer; rates stay the user's."""
    gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

    def task(transport: Transport) -> list[Tensor]:
        out = []
        for lr, scale in ((0.125, 2.0), (0.25, 1.0)):
            module = nn.ParameterList([nn.Parameter(torch.zeros(8, 8, dtype=dtype))])
            optimizer = make(module.parameters(), lr)
            parts = (WeightBlocks(), Quantized(1), CompressedAllReduce())
            reducer = Reducer(*parts, transport, constant(0.25), torch.device("cpu"))
            tap = UpdatesTap(Updates(lr_scale=scale, every=2), reducer, module, [optimizer], lambda _: False)
            Steps(tap, [optimizer])
            assert tap.lr_scales() == {"0": scale}

            def closure(module: nn.ParameterList = module) -> Tensor:
                module[0].grad = gradient.clone()
                return torch.zeros(())

            optimizer.step(closure)
            assert float(optimizer.param_groups[0]["lr"]) == lr
            out.append(module[0].detach().float())
        return out

    for scaled, expected in VirtualRanks(2).run(task):
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(scaled, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-7)


def test_a_step_that_failed_leaves_nothing_to_stretch() -> None:
    weight, stretch = torch.zeros(2), Stretch()
    stretch.before_step({"w": weight}, {"w": 3.0})
    weight += 1  # the step raised before it was announced
    stretch.before_step({"w": weight}, {"w": 3.0})
    weight += 1
    stretch.after_step({"w": weight})
    stretch.after_step({"w": weight})
    assert weight.tolist() == [4, 4]


@pytest.mark.parametrize("make", [SGD, Adam, AdamW], ids=lambda make: make.__name__)
def test_lent_rates_make_the_step_that_a_stretch_makes(make: Any) -> None:
    def train(by_rate: bool) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        weights = {name: nn.Parameter(torch.randn(5)) for name in "abc"}
        options = {"weight_decay": 0.1} | ({"momentum": 0.9} if make is SGD else {})
        groups = [{"params": [weights["a"], weights["b"]]}, {"params": [weights["c"]], "lr": 0.3}]
        optimizer = make(groups, lr=0.1, **options)
        rates, stretch, factors, seen = LentRates(), Stretch(), {"a": 1.5, "c": 1.2}, []

        def closure() -> None:
            # what a hook changes here counts for this very step
            seen.append(optimizer.param_groups[1]["lr"])
            optimizer.param_groups[1]["lr"] *= 0.5
            for p in weights.values():
                p.grad = torch.randn(5)

        for _ in range(3):
            if by_rate:
                assert rates.arm(optimizer, weights, factors)
            else:
                stretch.before_step({name: p.data for name, p in weights.items()}, factors)
            optimizer.step(closure)
            if by_rate:
                assert rates.applied == factors
                rates.disarm(optimizer)
            else:
                stretch.after_step({name: p.data for name, p in weights.items()})
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
        return [p.detach() for p in weights.values()], seen

    (lent, seen), (stretched, expected) = train(True), train(False)
    assert seen == expected == [0.3, 0.15, 0.075]
    torch.testing.assert_close(lent, stretched, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [SGD, Adam, AdamW], ids=lambda make: make.__name__)
def test_lent_rates_leave_parameters_without_gradient_alone(make: Any, options: dict[str, bool]) -> None:
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, rates = make([used, unused], lr=0.1, weight_decay=0.0, **options), LentRates()
    for gradient in (torch.ones(3), None):
        before = used.detach().clone()
        used.grad = gradient
        assert rates.arm(optimizer, {"used": used, "unused": unused}, {"used": 2.0, "unused": 1.5})
        optimizer.step()
        rates.disarm(optimizer)
        expected = torch.full((3,), 0.2 if gradient is not None else 0.0)
        torch.testing.assert_close(before - used.detach(), expected, rtol=1e-4, atol=0)
        assert unused.tolist() == [1, 1, 1]


def test_lent_rates_are_given_back_when_the_step_raises_and_not_lent_to_what_may_not_be_proportional() -> None:
    class Mine(AdamW):
        pass

    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    rates = LentRates()
    for optimizer in (Mine([weight]), RMSprop([weight])):
        assert not rates.arm(optimizer, {"w": weight}, {"w": 2.0})
    optimizer = AdamW([weight], lr=0.1)
    groups = optimizer.param_groups
    rates.arm(optimizer, {"w": weight}, {"w": 2.0})
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    rates.disarm(optimizer)
    assert optimizer.param_groups is groups
    assert groups[0]["lr"] == 0.1
    # a step that nobody has announced is made as ever
    before = weight.detach().clone()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    torch.testing.assert_close(before - weight.detach(), torch.full((3,), 0.1), rtol=0.05, atol=0)


def test_nothing_is_measured_where_a_step_or_a_factor_is_given() -> None:
    for config in (Updates(anchor_step=1.0), Updates(lr_scale=1.0)):

        def task(transport: Transport, config: Updates = config) -> int:
            weight = nn.Parameter(torch.zeros(64, 64))
            optimizer = torch.optim.SGD([weight], lr=0.01)
            return run_steps(transport, optimizer, noise, 8, config).lr_scales()["0"]

        assert VirtualRanks(4).run(task) == [1.0] * 4


def make_tap(
    transport: Transport, optimizer: torch.optim.Optimizer, module: nn.Module, config: Updates | None = None
) -> UpdatesTap:
    parts = (WeightBlocks(), Quantized(1), CompressedAllReduce())
    reducer = Reducer(*parts, transport, constant(0.25), torch.device("cpu"))
    return UpdatesTap(config or Updates(), reducer, module, [optimizer], lambda _: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_stay_where_they_are(dtype: torch.dtype) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).to(dtype)
    start[0].requires_grad_(False)

    def task(transport: Transport) -> nn.Module:
        module = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        tap = make_tap(transport, optimizer, module)
        Steps(tap, [optimizer])
        for step in range(12):
            optimizer.zero_grad()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + transport.rank)).to(dtype)
            module(x).square().mean().backward()
            optimizer.step()
        tap.finish()
        return module

    for module in VirtualRanks(2).run(task):
        assert torch.equal(module[0].weight, start[0].weight)
        assert not torch.equal(module[2].weight, start[2].weight)


def test_other_dtypes_are_refused_by_name_where_entries_are_picked() -> None:
    def task(transport: Transport) -> None:
        for compressor, codec, refused in ((TopK(), Raw(), True), (WeightBlocks(), Quantized(8), False)):
            communicator = AllGather() if refused else CompressedAllReduce()
            reducer = Reducer(compressor, codec, communicator, transport, constant(0.25), torch.device("cpu"))
            job = Job("model", 0, Residual(), ["small", "large"], [torch.ones(40), torch.ones(40).double()])
            if refused:
                with pytest.raises(TypeError, match=r"where entries are picked, got torch\.float64 in 'large'"):
                    reducer.pick(job)
            else:
                reducer.pick(job)
            reducer.close()

    VirtualRanks(2).run(task)
