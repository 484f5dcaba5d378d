"""Warmup: a learning rate that grows until the loss has its minimum behind it, and falls from there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.optim.gaussian_process import fit, probability_below
from lightning_sparse.random import Draw

_LENGTHSCALE = 0.2
_FIT_POINTS, _TEST_POINTS, _TESTS = 100, 500, 5
_SLACK = 1e-4
LEAST = 10
"""Losses that a test needs."""


@dataclass(frozen=True)
class Verdict:
    """Of one test: how sure it is that the minimum of the loss is behind, and the rate that belongs to it."""

    confidence: float
    is_past: bool
    rate: float
    has_evidence: bool = True


class Warmup:
    """The schedule and the test of AutoWU, without a training loop.

    Args:
        total_steps: of the run.
        lr_min, lr_max: the rate grows from one to the other, exponentially.
        growth: share of the steps in which it would get there; training goes on from what is best then.
        confidence: of a test, above which it votes.
        patience: tests in a row that must agree.
        cooldown: share of the steps, at the end, in which the rate falls to zero along a cosine; constant before that.
        seed: of the draws among many losses.
    """

    def __init__(
        self,
        total_steps: int,
        lr_min: float,
        lr_max: float,
        growth: float,
        confidence: float,
        patience: int,
        cooldown: float,
        seed: int = 0,
    ) -> None:
        self.total_steps = total_steps
        self.last_growing = self._span = max(1, int(growth * total_steps))
        self.losses: list[float] = []
        self.end: int | None = None
        """Step from which on the rate grows no more."""
        self.peak = 0.0
        self._lr_min, self._lr_max = lr_min, lr_max
        self._confidence, self._patience, self._cooldown, self._seed = confidence, patience, cooldown, seed
        self._votes = self._tests = 0

    def rate(self, step: float) -> float:
        """The learning rate of a step, counted from 0; 0 at ``total_steps``."""
        if self.end is None:
            return self._growing(step)
        start = max(self.end, round((1 - self._cooldown) * self.total_steps))
        if step <= start:
            return self.peak
        done = min(1.0, (step - start) / max(1, self.total_steps - start))
        return self.peak * 0.5 * (1 + math.cos(math.pi * done))

    def test(self) -> Verdict:
        """Look at all losses so far. Changes nothing, and gives the same on every machine of a kind.

        Too few of them are no evidence: the rate is that of the lowest one, the latest if they are equal.
        """
        points = _usable(self.losses)
        if len(points) < LEAST:
            lowest = min(points, key=lambda point: (point[1], -point[0]), default=(0, math.nan))
            return Verdict(0.0, False, self._growing(lowest[0]), has_evidence=False)
        last = len(self.losses) - 1
        x = torch.tensor([at / last for at, _ in points], dtype=torch.float64)
        y = torch.tensor([loss for _, loss in points], dtype=torch.float64)
        y = (y - y.mean()) / y.std().clamp(min=1e-12)
        process = fit(*self._some(x, y, _FIT_POINTS, "fit"), _LENGTHSCALE)
        grid = torch.linspace(0, float(x[-1]), 500, dtype=torch.float64)
        sure, rates = [], []
        # a few losses are the same in each test
        for test in range(_TESTS if len(x) > _TEST_POINTS else 1):
            mean, variance = process.posterior(*self._some(x, y, _TEST_POINTS, f"test {test}"), grid)
            sure.append(probability_below(mean, variance, _SLACK))
            rates.append(self._growing(float(grid[mean.argmin()]) * last))
        votes = sum(p > self._confidence for p in sure)
        return Verdict(statistics.median(sure), 2 * votes > len(sure), statistics.fmean(rates))

    def decide(self, verdict: Verdict) -> bool:
        """Take up a test's verdict behind the losses so far; whether the rate grows no more."""
        self._tests += 1
        self._votes = self._votes + 1 if verdict.is_past else 0
        if self._votes < self._patience and len(self.losses) < self.last_growing:
            return False
        self.end, self.peak, self.losses = len(self.losses), verdict.rate, []
        return True

    def state_dict(self) -> dict[str, Any]:
        """Equal on all ranks."""
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "curve": [self._lr_min, self._lr_max, self._span],
            "end": self.end,
            "peak": self.peak,
            "votes": self._votes,
            "tests": self._tests,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave. The rate goes on along its curve, whatever the number of steps is now.

        Growth ends where the curve does, or at its share of fewer steps. Raises ValueError while the rate grows, if it
        grew from or to another one.
        """
        self.losses = state["losses"].tolist()
        self.end, self.peak = state["end"], float(state["peak"])
        lr_min, lr_max, span = state["curve"]
        if self.end is None:
            if (lr_min, lr_max) != (self._lr_min, self._lr_max):
                raise ValueError(
                    f"AutoWarmup: expected the lr_min and lr_max that the checkpoint's losses belong to, {lr_min} and"
                    f" {lr_max}, got {self._lr_min} and {self._lr_max}: pass those, or begin anew"
                )
            self._span = span
            self.last_growing = min(self.last_growing, span)
        self._votes, self._tests = int(state["votes"]), int(state["tests"])

    def _growing(self, step: float) -> float:
        return self._lr_min * (self._lr_max / self._lr_min) ** (min(step, self._span) / self._span)

    def _some(self, x: Tensor, y: Tensor, most: int, name: str) -> tuple[Tensor, Tensor]:
        """At most so many points, without replacement, in order."""
        if len(x) <= most:
            return x, y
        order = Draw(self._seed, self._tests, f"AutoWU {name}").bits(len(x)).argsort(stable=True)
        chosen = order[:most].sort().values
        return x[chosen], y[chosen]


def _usable(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Steps and losses that a process can be fitted to.

    What is as much above the first losses as the best is below them says that training diverges, whatever its size, and
    so does a run of losses at the end that are not finite. Single ones, as of steps that are skipped, are left out.
    """
    finite = [(at, loss) for at, loss in enumerate(losses) if math.isfinite(loss)]
    if len(finite) < LEAST:
        return finite
    width = max(5, len(finite) // 20)
    first = [loss for _, loss in finite[:width]]
    start = statistics.median(first)
    spread = statistics.median(abs(loss - start) for loss in first)
    medians = [
        statistics.median(y for _, y in finite[at : at + width]) for at in range(0, len(finite) - width + 1, width)
    ]
    top = 2 * start - min(medians) + 6 * spread
    tail = [(at, top) for at in range(finite[-1][0] + 1, len(losses))]
    return [(at, min(loss, top)) for at, loss in finite] + tail


def check_warmup(
    lr_min: float, lr_max: float, growth: float, confidence: float, patience: int, cooldown: float
) -> None:
    """Raise ValueError on an argument of ``AutoWarmup`` out of range."""
    if not 0 < lr_min < lr_max < math.inf:
        raise ValueError(f"AutoWarmup: expected 0 < lr_min < lr_max, got {lr_min!r} and {lr_max!r}")
    for name, value in (("growth", growth), ("cooldown", cooldown)):
        if not 0 < value <= 1:
            raise ValueError(f"AutoWarmup: {name} must be in (0, 1], a share of the steps, got {value!r}")
    if not 0.5 <= confidence < 1:
        raise ValueError(f"AutoWarmup: confidence must be in [0.5, 1), got {confidence!r}")
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise ValueError(f"AutoWarmup: patience must be an integer of at least 1, got {patience!r}")
