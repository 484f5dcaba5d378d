"""AdaScale against closed forms: how the estimates are made, and how an optimizer steps with them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.arguments import is_linear
from lightning_sparse.callbacks.norms import Norms, TappedGradients, _average
from lightning_sparse.communicators import VirtualRanks
from lightning_sparse.optim import AdaScale
from lightning_sparse.optim.gain import Gain
from lightning_sparse.optim.norms import squares


def draw(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def feed(gain: Gain, gradients: Tensor, passes: int = 1) -> bool:
    """One step whose independent gradients are the rows."""
    each, mean = gradients.square().sum(1).mean(), gradients.mean(0).square().sum()
    return gain.update([float(each)], [float(mean)], len(gradients), passes)


def with_gradients(rows: Iterable[Tensor], average_loss: bool, loss_scale: float = 1.0, lr: float = 0.1) -> AdaScale:
    """A wrapped SGD that has seen one step, whose passes have these gradients."""
    rows = list(rows)
    weight = nn.Parameter(torch.zeros(len(rows[0])))
    optimizer = AdaScale(torch.optim.SGD([weight], lr), passes=len(rows))
    for row in rows:
        loss = (weight * row.float()).sum() * loss_scale
        (loss / len(rows) if average_loss else loss).backward()
        optimizer.observe_pass(loss_scale)
    weight.grad /= loss_scale
    optimizer.step()
    return optimizer


class TestGain:
    @pytest.mark.parametrize(("scale", "passes"), [(4, 1), (8, 1), (16, 4)])
    def test_estimates_have_no_bias(self, scale: int, passes: int) -> None:
        """4 samples, each the mean of ``passes`` micro-batches of trace 30 about a mean of squared norm 3."""
        gain = Gain(1, scale, 4 * passes, smoothing=1 - 1e-9)  # a plain mean over all trials
        noise = draw(4 * 20_000, 12).view(20_000, 4, 12) * math.sqrt(2.5)
        for trial in noise / math.sqrt(passes) + 0.5:
            feed(gain, trial, passes)
        # a base batch has 4 * passes / scale micro-batches
        assert gain.variance == pytest.approx(30 * scale / (4 * passes), rel=0.01)
        assert gain.mean == pytest.approx(3, rel=0.02)
        sigma, mu = 30 * scale / (4 * passes), 3
        assert gain.value == pytest.approx((sigma + mu) / (sigma / scale + mu), rel=0.01)
        assert gain.noise_scale == pytest.approx(sigma / mu, rel=0.03)

    def test_identical_gradients_are_worth_one_step(self) -> None:
        gain = Gain(1, 8, 8)
        feed(gain, draw(1, 30).expand(8, 30))
        assert gain.value == pytest.approx(1, abs=1e-9)
        assert gain.noise_scale == pytest.approx(0, abs=1e-9)

    def test_pure_noise_is_worth_scale_steps(self) -> None:
        gain = Gain(1, 8, 8)
        for step in range(200):
            feed(gain, draw(8, 1000, seed=step))
        assert gain.value == pytest.approx(8, rel=0.02)
        # vectors whose sum is zero: no signal at all
        feed(none := Gain(1, 8, 2), torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))
        assert none.value == 8
        assert none.noise_scale == math.inf

    def test_the_gain_stays_between_one_and_scale(self) -> None:
        for seed in range(100):
            gain = Gain(1, 5, 3, smoothing=0.5)
            for step in range(3):
                feed(gain, draw(3, 2, seed=10 * seed + step) + seed / 25)
                assert 1 <= gain.value <= 5

    def test_a_step_may_be_the_base_batch_or_less(self) -> None:
        known = Gain(1, 4, 4)
        known.update([4.0], [1.0], 4)  # noise alone
        for scale, micro_batches in ((1, 1), (0.5, 2), (2, 2)):
            gain = Gain(1, scale, micro_batches)
            gain.load_state_dict(known.state_dict())
            assert gain.value == scale
            assert gain.update([1.0], [1.0], 1)  # one sample tells nothing
            assert gain.value == scale

    def test_running_means_are_plain_means_at_first(self) -> None:
        gain = Gain(1, 2, 2, smoothing=0.998)
        for values in (1.0, 3.0):
            gain.update([values], [0.0], 2)
        assert gain.variance == pytest.approx(2 * (1 + 3) / 2, rel=2e-3)
        assert Gain(1, 2, 2).smoothing == 0.998
        assert Gain(1, 2000, 2000).smoothing == 0

    def test_groups_have_gains_of_their_own(self) -> None:
        gain = Gain(2, 4, 4)
        gain.update([1.0, 1.0], [0.25, 1.0], 4)
        assert [gain.of_group(0), gain.of_group(1)] == pytest.approx([4, 1])
        # sigma^2 is 1 and mu^2 is 1 in all
        assert gain.value == pytest.approx(2 / (1 / 4 + 1))
        gain.grow(3)
        gain.update([0.0, 0.0, 1.0], [0.0, 0.0, 0.25], 4)
        assert [gain.of_group(at) for at in range(3)] == pytest.approx([4, 1, 4])

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_leaves_no_trace(self, bad: float) -> None:
        gain = Gain(1, 4, 4)
        assert gain.update([3.0], [1.0], 4)
        before = gain.state_dict()
        assert not gain.update([bad], [1.0], 4)
        assert not gain.update([1.0], [bad], 4)
        assert gain.update([9.0], [9.0], 1)  # one sample tells nothing
        assert gain.state_dict() == before

    def test_the_state_goes_on_with_another_number_of_ranks(self) -> None:
        gain = Gain(1, 4, 4)
        feed(gain, draw(4, 50) + 0.1)
        gain.advance(gain.value)
        twice = Gain(1, 8, 8)
        twice.load_state_dict(gain.state_dict())
        # a base batch is one micro-batch in both
        assert (twice.variance, twice.mean, twice.steps) == (gain.variance, gain.mean, gain.value)
        finer = Gain(1, 8, 4)
        finer.load_state_dict(gain.state_dict())
        assert finer.variance == 2 * gain.variance
        with pytest.raises(ValueError, match="expected a state of 2 parameter groups, got one of 1"):
            Gain(2, 4, 4).load_state_dict(gain.state_dict())


def test_groups_that_are_added_are_seen_in_the_gradients_of_ranks() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [a]}]
    reducer: Any = SimpleNamespace(averages_all=lambda step: True, transport=SimpleNamespace(world_size=2))

    def submit_mean(buffer: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        future.set_result(buffer)
        return future

    reducer.submit_mean = submit_mean
    tap: Any = SimpleNamespace(observers=[])
    source = TappedGradients(lambda: groups, {id(a): "a", id(b): "b"}, tap, reducer)
    for step, expected in enumerate([[2.0], [2.0, 3.0]]):
        gradients = {"names": ["a"], "inputs": [torch.ones(2)], "dense_names": ["b"], "dense_inputs": [torch.ones(3)]}
        job: Any = SimpleNamespace(step=step, memory=SimpleNamespace(norm=lambda: 0), **gradients)
        source.before(job)
        source.after(SimpleNamespace(picked=SimpleNamespace(job=job)))
        norms = source.before_step(1, 1)()
        assert (norms.samples, norms.passes) == (2, 1)
        assert norms.each == pytest.approx(expected)
        assert norms.mean == pytest.approx(expected)
        groups.append({"params": [b]})


@pytest.mark.parametrize("width", [None, 3])
def test_ranks_agree_on_passes_where_one_has_left_some_out(width: int | None) -> None:
    def rank(transport: Any) -> Norms:
        def submit_mean(buffer: Tensor) -> Future[Tensor]:
            future: Future[Tensor] = Future()
            future.set_result(transport.all_reduce_mean_(buffer))
            return future

        passes, ones = transport.rank + 2, torch.ones(1, width) if width else torch.ones(1)
        reducer: Any = SimpleNamespace(submit_mean=submit_mean, transport=transport)
        return _average(reducer, torch.ones(1), passes / 4 * ones, passes, 4)()

    ranks = VirtualRanks(3).run(rank)
    assert ranks[0] == ranks[1] == ranks[2]
    assert (ranks[0].samples, ranks[0].passes) == (3, 3)


class TestAdaScale:
    def test_sums_and_means_over_passes_and_loss_scales_give_one_gain(self) -> None:
        rows = draw(6, 20) + 0.3
        v = float(rows.var(0).sum())  # torch divides by n - 1
        mu = float(rows.mean(0).square().sum()) - v / 6
        expected = (v + mu) / (v / 6 + mu)
        for average_loss, loss_scale in ((True, 1.0), (False, 1.0), (True, 1024.0), (False, 1024.0)):
            optimizer = with_gradients(rows, average_loss, loss_scale)
            # squared norms are float32
            assert optimizer.gain.value == pytest.approx(expected, rel=1e-5)
            step = -optimizer.param_groups[0]["params"][0].detach()
            gradient = rows.mean(0).float() * (1 if average_loss else 6)
            torch.testing.assert_close(step, 0.1 * optimizer.gain.value * gradient)
            assert optimizer.param_groups[0]["lr"] == 0.1

    def test_ranks_equal_passes(self) -> None:
        rows = (draw(4, 20) + 0.2).float()
        alone = with_gradients(rows, average_loss=True)

        def rank(transport: object) -> AdaScale:
            weight = nn.Parameter(torch.zeros(20))
            average = transport.all_reduce_mean_
            optimizer = AdaScale(torch.optim.SGD([weight], 0.1), world_size=4, average=average)
            (weight * rows[transport.rank]).sum().backward()
            optimizer.observe_pass()
            average(weight.grad)
            optimizer.observe_mean()
            weight.grad.clamp_(-0.1, 0.1)  # clipping changes the step and not the estimate
            optimizer.step()
            return optimizer

        ranks = VirtualRanks(4).run(rank)
        assert len({optimizer.gain.value for optimizer in ranks}) == 1
        assert ranks[0].gain.value == pytest.approx(alone.gain.value, rel=1e-5)
        clipped = 0.1 * ranks[0].gain.value * rows.mean(0).clamp(-0.1, 0.1)
        torch.testing.assert_close(-ranks[2].param_groups[0]["params"][0].detach(), clipped)

    def test_real_steps_are_scale_invariant_steps_over_the_mean_gain(self) -> None:
        weight = nn.Parameter(torch.zeros(500))
        optimizer = AdaScale(torch.optim.SGD([weight], 0.0), passes=4)
        gains = []
        while optimizer.gain.steps < 60:
            for at in range(4):
                (weight * draw(1, 500, seed=4 * len(gains) + at)[0].float()).sum().backward()
                optimizer.observe_pass()
            optimizer.step()
            optimizer.zero_grad()
            gains.append(optimizer.gain.value)
        assert len(gains) == math.ceil(60 / (sum(gains) / len(gains)))
        assert 15 <= len(gains) <= 17

    @pytest.mark.parametrize("noise", [0.0, 1.0])
    def test_a_step_of_fewer_passes_counts_as_its_share(self, noise: float) -> None:
        """Of 4 passes, then of 1, with losses divided by 4: the second step is a quarter as long."""
        weight = nn.Parameter(torch.zeros(4))
        optimizer = AdaScale(torch.optim.SGD([weight], 1.0), passes=4)
        for passes in (range(4), range(1)):
            for at in passes:
                gradient = torch.eye(4)[at] if noise else torch.full((4,), 0.5)
                ((weight * gradient).sum() / 4).backward()
                optimizer.observe_pass()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.gain.value == pytest.approx(4 if noise else 1)
        # noise: as many steps of the base batch as there were passes, and as long a way
        assert optimizer.gain.steps == pytest.approx(5 if noise else 1.25)
        assert float(-weight.detach().sum()) == pytest.approx(5 if noise else 1.25 * 2)

    def test_power_one_half_and_groups(self) -> None:
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": torch.tensor(0.5)}])
        optimizer = AdaScale(inner, passes=2, power=0.5)
        rates = [group["lr"] for group in optimizer.param_groups]
        for row in torch.eye(2):
            ((a * row).sum() + b.sum()).backward()
            optimizer.observe_pass()
        optimizer.step()
        torch.testing.assert_close(a.detach(), torch.full((2,), -math.sqrt(2)))
        torch.testing.assert_close(b.detach(), torch.full((2,), -0.5 * 2))
        assert [group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True)] == [True, True]

    def test_unused_frozen_and_sparse_parameters(self) -> None:
        table, used, unused = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        optimizer = AdaScale(torch.optim.SGD([*table.parameters(), used, unused], 0.1), passes=2)
        rows = [torch.tensor([1, 1]), torch.tensor([1, 3])]
        gradients = []
        for at, row in enumerate(rows):
            expected = torch.zeros(5, 2).index_add_(0, row, torch.ones(2, 2)).flatten()
            gradients.append(torch.cat([expected, torch.full((2,), float(at))]))
            (table(row).sum() + at * used.sum()).backward()
            optimizer.observe_pass()
        optimizer.step()
        feed(expected_gain := Gain(1, 2, 2), torch.stack(gradients))
        assert optimizer.gain.value == pytest.approx(expected_gain.value)

    def test_a_bad_pass_is_not_counted(self) -> None:
        optimizer = with_gradients(torch.tensor([[1.0, 0.0], [math.nan, 1.0]]), average_loss=True)
        assert (optimizer.gain.value, optimizer.gain.steps) == (1, 0)

    def test_a_step_that_was_not_made_is_forgotten(self) -> None:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = AdaScale(torch.optim.SGD([weight], 0.1), passes=2)
        weight.sum().backward()
        optimizer.observe_pass()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"expected observe_pass\(\) behind every backward pass"):
            optimizer.step()

    def test_rates_come_back_when_a_step_fails(self) -> None:
        optimizer = with_gradients(torch.eye(2), average_loss=True)
        optimizer.driven = True

        def fail() -> None:
            assert optimizer.param_groups[0]["lr"] == 0.2
            raise RuntimeError("no step")

        optimizer.inner.step = fail
        with pytest.raises(RuntimeError, match="no step"):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.1

    def test_state_schedulers_closures_and_hooks(self) -> None:
        def make() -> tuple[AdaScale, nn.Parameter]:
            weight = nn.Parameter(torch.zeros(3))
            return AdaScale(torch.optim.SGD([weight], 0.1, momentum=0.9), passes=2), weight

        def train(optimizer: AdaScale, weight: nn.Parameter, steps: range) -> None:
            for step in steps:

                def closure(step: int = step) -> float:
                    optimizer.zero_grad()
                    for at in range(2):
                        ((weight - draw(1, 3, seed=2 * step + at)[0].float()).square().sum()).backward()
                        optimizer.observe_pass()
                    return 7.0

                assert optimizer.step(closure) == 7.0

        whole, cut, resumed = make(), make(), make()
        train(*whole, range(8))
        train(*cut, range(5))
        resumed[0].load_state_dict(cut[0].state_dict())
        resumed[1].data.copy_(cut[1].data)
        train(*resumed, range(5, 8))
        assert torch.equal(resumed[1], whole[1])
        assert resumed[0].gain.state_dict() == whole[0].gain.state_dict()

        optimizer, weight = make()
        optimizer.load_state_dict(torch.optim.SGD([weight], 0.3).state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.3
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(optimizer, weight, range(1))
        scheduler.step()
        assert seen == [0.3]
        assert optimizer.param_groups[0]["lr"] == 0.15

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    @pytest.mark.parametrize("seen", [0, 1, 2])
    def test_a_copy_steps_itself_though_a_scheduler_is_attached(self, duplicate: Any, seen: int) -> None:
        """Within a step too: copies of parameters have no gradients, so it begins anew."""
        weight = nn.Parameter(torch.zeros(2))
        optimizer = AdaScale(torch.optim.SGD([weight], 1.0), passes=2)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for row in torch.eye(2)[:seen]:
            (weight * row).sum().backward()
            optimizer.observe_pass()
        other = duplicate(optimizer)
        copied = other.param_groups[0]["params"][0]
        for row in torch.eye(2):
            (copied * row).sum().backward()
            other.observe_pass()
        other.step()
        assert other.gain.value == pytest.approx(2)
        assert copied.tolist() == pytest.approx([-2, -2])
        assert weight.tolist() == [0, 0]

    def test_norms_of_float64_are_float64(self) -> None:
        """The noise is 1e-10 of the signal, less than float32 tells apart; one pass has float32 gradients alone."""
        weight, other = nn.Parameter(torch.zeros(2).double()), nn.Parameter(torch.zeros(2))
        optimizer = AdaScale(torch.optim.SGD([weight, other], 1.0), passes=3)
        for noise in (1e-5, -1e-5):
            (weight * torch.tensor([1.0, noise]).double()).sum().backward()
            optimizer.observe_pass()
        other.sum().backward()
        optimizer.observe_pass()
        rows = torch.tensor([[1.0, 1e-5, 0, 0], [1.0, -1e-5, 0, 0], [0, 0, 1.0, 1.0]], dtype=torch.float64)
        optimizer.step()
        feed(expected := Gain(1, 3, 3), rows)
        assert optimizer.gain.variance == pytest.approx(expected.variance, rel=1e-12)
        assert squares([torch.tensor([1.0, 1e-5]).double()]).item() == pytest.approx(1 + 1e-10, rel=1e-15)
        assert squares([torch.ones(2).bfloat16()]).dtype == torch.float32

    def test_a_group_that_the_other_optimizer_gets_has_a_gain(self) -> None:
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizer = AdaScale(torch.optim.SGD([a], 1.0), passes=2)
        optimizer.inner.add_param_group({"params": [b]})
        assert len(optimizer.state_dict()["adascale"]["means"]) == 2
        for row in torch.eye(2):
            (a.sum() + (b * row).sum()).backward()
            optimizer.observe_pass()
        optimizer.step()
        assert (a.tolist(), b.tolist()) == ([-2, -2], [-2, -2])
        assert [optimizer.gain.of_group(at) for at in range(2)] == pytest.approx([1, 2])

    def test_sgd_stays_linear_in_the_gradient_for_the_exchange(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        assert is_linear(AdaScale(torch.optim.SGD([weight], 0.1), passes=2))
        assert not is_linear(AdaScale(torch.optim.AdamW([weight], 0.1), passes=2))

    def test_what_cannot_be_estimated_is_refused(self) -> None:
        inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
        with pytest.raises(
            ValueError, match="expected at least 2 micro-batches a step, to tell noise from signal, got 1"
        ):
            AdaScale(inner)
        with pytest.raises(ValueError, match="scale must be above 1, got 1"):
            AdaScale(inner, passes=2, scale=1)
        with pytest.raises(ValueError, match="expected average= for 2 ranks, got None"):
            AdaScale(inner, world_size=2)
        with pytest.raises(ValueError, match=r"power must be in \(0, 1\], got 2"):
            AdaScale(inner, passes=2, power=2)
        with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\) or None, got 1"):
            AdaScale(inner, passes=2, smoothing=1)
        with pytest.raises(TypeError, match="expected an optimizer such as SGD to wrap, got AdaScale"):
            AdaScale(AdaScale(inner, passes=2), passes=2)
