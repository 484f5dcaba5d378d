"""AutoWU on losses that are known: the process behind it, when it decides, and for which rate."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_sparse.optim.gaussian_process import GaussianProcess, fit, probability_below
from lightning_sparse.optim.warmup import Verdict, Warmup

BEST = 0.03
TOTAL, EVERY = 1200, 20


def draw(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(a: Tensor, b: Tensor) -> Tensor:
    return torch.tensor([[math.exp(-((float(p) - float(q)) ** 2) / 2 / 0.2**2) for q in b] for p in a]).double()


class TestGaussianProcess:
    def test_posterior_is_that_of_the_joint_normal(self) -> None:
        process = GaussianProcess(lengthscale=0.2, constant=1.5, signal=2.0, noise=0.3)
        x, grid, y = torch.rand(12).double(), torch.linspace(0, 1, 7).double(), draw(12) + 1
        mean, variance = process.posterior(x, y, grid)
        inverse = torch.linalg.inv(2 * covariance(x, x) + 0.3 * torch.eye(12))
        across = 2 * covariance(grid, x)
        joint = 2 * covariance(grid, grid) - across @ inverse @ across.T
        torch.testing.assert_close(mean, 1.5 + across @ inverse @ (y - 1.5), rtol=1e-5, atol=1e-6)
        expected = joint.diagonal() + joint[-1, -1] - 2 * joint[:, -1]
        torch.testing.assert_close(variance, expected, rtol=1e-4, atol=1e-6)

    def test_no_other_process_is_more_likely(self) -> None:
        x = torch.linspace(0, 1, 40).double()
        y = 3 + torch.sin(4 * x) + 0.2 * draw(40)

        def likelihood(process: GaussianProcess) -> float:
            normal = torch.distributions.MultivariateNormal(
                torch.full((40,), process.constant).double(),
                process.signal * covariance(x, x) + process.noise * torch.eye(40),
            )
            return float(normal.log_prob(y))

        best = fit(x, y, 0.2)
        top = likelihood(best)
        for seed in range(200):
            a, b, c = (float(z) for z in 0.5 * draw(3, seed))
            other = GaussianProcess(0.2, best.constant + a, best.signal * math.exp(b), best.noise * math.exp(c))
            # noise over signal is known to the nearest 12 %
            assert likelihood(other) < top + 0.01
        assert best.noise == pytest.approx(0.04, rel=0.5)

    def test_probability_is_that_of_the_best_point(self) -> None:
        mean, variance = torch.tensor([0.0, 1.0, 2.0]).double(), torch.tensor([4.0, 0.25, 0.0]).double()
        # one and two standard deviations
        assert probability_below(mean, variance, 0.0) == pytest.approx(0.97725, abs=1e-5)
        assert probability_below(-mean, variance, 0.0) < 0.5


def search(
    loss: Callable[[float, int], float], noise: float, seed: int = 0, patience: int = 3, cooldown: float = 1.0
) -> Warmup:
    """Grow until the decision, with losses that depend on the rate and the step."""
    warmup = Warmup(TOTAL, 1e-5, 1.0, 0.5, 0.95, patience, cooldown)
    errors = (noise * draw(TOTAL, seed)).tolist()
    for step in range(TOTAL):
        warmup.losses.append(loss(warmup.rate(step), step) + errors[step])
        if (step + 1) % EVERY == 0 and warmup.decide(warmup.test()):
            break
    return warmup


def step_of(rate: float) -> float:
    return TOTAL / 2 * math.log(rate / 1e-5) / math.log(1e5)


def v_shape(rate: float, step: int) -> float:
    return 2.3 + 0.4 * abs(math.log(rate / BEST))


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lands_at_the_bottom_of_a_v_shortly_behind_it(noise: float, seed: int) -> None:
    warmup = search(v_shape, noise, seed)
    assert BEST / 1.5 < warmup.peak < BEST * 1.5
    assert warmup.end is not None
    # one test more than patience while the losses do not hide it
    late = (3 + 1) * EVERY if noise < 0.1 else 7 * EVERY
    assert step_of(BEST) < warmup.end <= step_of(BEST) + late


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("falling", [lambda r, t: 3 - 2 * t / TOTAL, lambda r, t: 0.5 + 2 * math.exp(-4 * t / TOTAL)])
def test_never_decides_on_a_falling_loss(falling: Callable[[float, int], float], noise: float) -> None:
    assert search(falling, noise).end == TOTAL // 2


@pytest.mark.parametrize("end", [math.nan, math.inf, 1e30])
def test_losses_that_explode_end_it_at_once(end: float) -> None:
    def loss(rate: float, step: int) -> float:
        return 4 - 0.2 * math.log(rate / 1e-5) if rate < BEST else end

    warmup = search(loss, 0.05)
    assert warmup.end is not None
    assert step_of(BEST) < warmup.end <= step_of(BEST) + (3 + 1) * EVERY
    assert BEST / 5 < warmup.peak < BEST


def test_single_bad_losses_are_left_out() -> None:
    clean = search(v_shape, 0.1)
    holes = search(lambda rate, step: math.nan if step % 17 == 3 else v_shape(rate, step), 0.1)
    assert holes.peak == pytest.approx(clean.peak, rel=0.1)
    nothing = search(lambda rate, step: math.nan, 0.0)
    assert nothing.end == TOTAL // 2
    few = search(lambda rate, step: 1.0 if step < 9 else math.nan, 0.0)
    # of equal losses the last one that is known, and not the rate that was reached
    assert few.peak == pytest.approx(1e-5 * 1e5 ** (8 / (TOTAL // 2)), rel=1e-6)


@pytest.mark.parametrize(("losses", "best"), [([], 0), (range(9), 0), ([3, 2, 1, 2, math.nan, math.inf, 4], 2)])
def test_too_few_losses_are_no_evidence_and_give_the_rate_of_the_lowest(losses: list[float], best: int) -> None:
    warmup = Warmup(18, 1e-5, 1.0, 0.5, 0.95, 3, 1.0)
    warmup.losses = [float(loss) for loss in losses]
    verdict = warmup.test()
    assert not verdict.has_evidence
    assert verdict.rate == warmup.rate(best)
    warmup.losses = [1.0 + at for at in range(10)]
    assert warmup.test().has_evidence


def test_only_tests_in_a_row_count() -> None:
    warmup = Warmup(TOTAL, 1e-5, 1.0, 0.5, 0.95, patience=2, cooldown=1.0)
    yes, no = Verdict(1.0, True, 0.2), Verdict(0.0, False, 0.2)
    assert [warmup.decide(verdict) for verdict in (yes, no, yes, yes)] == [False, False, False, True]
    assert (warmup.peak, warmup.end) == (0.2, 0)


def test_rates_grow_exponentially_and_fall_along_a_cosine() -> None:
    warmup = Warmup(100, 1e-4, 1.0, 0.5, 0.95, 1, cooldown=1.0)
    assert [warmup.rate(step) for step in (0, 25, 50)] == pytest.approx([1e-4, 1e-2, 1])
    warmup.losses = [1.0] * 20
    warmup.decide(Verdict(1.0, True, 0.4))
    assert [warmup.rate(step) for step in (20, 40, 60, 80, 100)] == pytest.approx(
        [0.4, 0.341421, 0.2, 0.058579, 0], abs=1e-6
    )
    late = Warmup(100, 1e-4, 1.0, 0.5, 0.95, 1, cooldown=0.2)
    late.losses = [1.0] * 20
    late.decide(Verdict(1.0, True, 0.4))
    assert [late.rate(step) for step in (20, 79, 80, 90, 100)] == pytest.approx([0.4, 0.4, 0.4, 0.2, 0], abs=1e-9)


def test_many_losses_are_drawn_from_alike_everywhere_and_the_state_goes_on() -> None:
    def grown() -> Warmup:
        warmup = Warmup(8000, 1e-5, 1.0, 0.5, 0.95, 3, 1.0)
        errors = (0.2 * draw(3000)).tolist()
        warmup.losses = [v_shape(warmup.rate(step), step) + errors[step] for step in range(3000)]
        return warmup

    torch.manual_seed(1)
    first = grown().test()
    torch.manual_seed(2)
    second = grown()
    assert second.test() == first
    # drawn anew for each test
    second.decide(Verdict(1.0, True, 0.1))
    other = second.test()
    assert other != first
    resumed = Warmup(8000, 1e-5, 1.0, 0.5, 0.95, 3, 1.0)
    resumed.load_state_dict(second.state_dict())
    assert resumed.test() == other
    assert [resumed.decide(other), resumed.decide(other)] == [False, True]
    assert BEST / 1.5 < resumed.peak < BEST * 1.5


@pytest.mark.parametrize("total", [600, 900, TOTAL, 2 * TOTAL])
def test_a_state_keeps_its_rates_with_another_number_of_steps(total: int) -> None:
    errors = (0.05 * draw(TOTAL)).tolist()
    first = Warmup(TOTAL, 1e-5, 1.0, 0.5, 0.95, 3, 1.0)
    first.losses = [v_shape(first.rate(step), step) + errors[step] for step in range(300)]
    second = Warmup(total, 1e-5, 1.0, 0.5, 0.95, 3, 1.0)
    second.load_state_dict(first.state_dict())
    third = Warmup(TOTAL, 1e-5, 1.0, 0.5, 0.95, 3, 1.0)
    third.load_state_dict(second.state_dict())
    while second.end is None:
        step = len(second.losses)
        assert second.rate(step) == third.rate(step) == first.rate(step)
        second.losses.append(v_shape(second.rate(step), step) + errors[step])
        if (step + 1) % EVERY == 0 or step + 1 >= second.last_growing:
            second.decide(second.test())
    assert second.end <= TOTAL // 2
    # half of 600 steps are over: the best rate so far is the last one
    best = first.rate(300) if total == 600 else BEST
    assert best / 1.5 < second.peak < best * 1.5
    assert second.rate(total) == pytest.approx(0, abs=1e-9)


def test_a_state_with_other_bounds_is_refused_while_the_rate_grows() -> None:
    first, second = (Warmup(TOTAL, 1e-5, top, 0.5, 0.95, 3, 1.0) for top in (1.0, 2.0))
    with pytest.raises(ValueError, match=r"expected the lr_min and lr_max .* belong to, 1e-05 and 1.0, got 1e-05 and"):
        second.load_state_dict(first.state_dict())
    first.decide(Verdict(1.0, True, 0.4))
    first.decide(Verdict(1.0, True, 0.4))
    first.decide(Verdict(1.0, True, 0.4))
    second.load_state_dict(first.state_dict())
    assert second.rate(0) == 0.4
