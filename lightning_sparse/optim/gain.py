"""Gain: how many small steps one large step is worth, from the norms of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class Gain:
    """Estimates the gain of AdaScale for each parameter group, and counts scale-invariant steps.

    With sigma^2 the trace of the gradient's covariance over base batches, mu^2 the squared norm of its expectation and
    S the scale, the gain is ``r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)``, between 1 (all micro-batches agree) and S
    (noise alone). From n independent gradients g_i with mean g, without bias whatever n is::

        noise = n / (n - 1) * (mean of |g_i|^2 - |g|^2)     # of one g_i
        sigma^2 = noise * micro-batches in a g_i / micro-batches in a base batch ; mu^2 = |g|^2 - noise / n

    Both are running means, of plain numbers at first, and the ratio is formed of the means. A step of the base batch
    is worth 1, and a smaller one between S and 1.

    Args:
        groups: parameter groups.
        scale: S > 0, the batch of one step over the base batch that learning rates and schedules are meant for.
        micro_batches: in one step, over all ranks and passes; with 1 what is known stays.
        smoothing: of the running means, in [0, 1); None takes ``max(1 - micro_batches / 1000, 0)``.

    Source: Johnson et al., "AdaScale SGD", ICML 2020, https://proceedings.mlr.press/v119/johnson20a.html, section 3 and
    appendix B.3. Here single estimates may be negative, so that their means have no bias; only the means are clipped.

    Example:
        >>> gain = Gain(groups=1, scale=4, micro_batches=4)
        >>> gain.update(each=[4.0], mean=[1.0], samples=4)  # orthogonal gradients: noise alone
        True
        >>> gain.of_group(0)
        4.0
    """

    def __init__(self, groups: int, scale: float, micro_batches: int, smoothing: float | None = None) -> None:
        self.scale = float(scale)
        self.micro_batches = micro_batches
        self.smoothing = smoothing if smoothing is not None else max(1 - micro_batches / 1000, 0.0)
        self.steps = 0.0
        """Scale-invariant steps so far: the sum of the gains of all steps that were made, or of their shares."""
        self._variances = [0.0] * groups
        self._means = [0.0] * groups
        self._weight = 0.0

    def update(self, each: Sequence[float], mean: Sequence[float], samples: int, passes: float = 1) -> bool:
        """Take up one step's gradients; False, and no change, if they are not finite. One sample alone tells nothing.

        Args:
            each: of each group, the mean over samples of the squared norm.
            mean: of each group, the squared norm of the mean.
            samples: independent gradients.
            passes: micro-batches in each of them.
        """
        groups = len(self._means)
        if len(each) != groups or len(mean) != groups:
            raise ValueError(f"Gain: expected squared norms of {groups} groups, got {len(each)} and {len(mean)}")
        if not all(map(math.isfinite, (*each, *mean))):
            return False
        if samples < 2:
            return True
        keep = self.smoothing
        per_base = passes * self.scale / self.micro_batches
        for group, (a, b) in enumerate(zip(each, mean, strict=True)):
            noise = samples / (samples - 1) * (a - b)
            self._variances[group] = keep * self._variances[group] + (1 - keep) * noise * per_base
            self._means[group] = keep * self._means[group] + (1 - keep) * (b - noise / samples)
        self._weight = keep * self._weight + (1 - keep)
        return True

    def grow(self, groups: int) -> None:
        """Make room for parameter groups that the optimizer has got since."""
        more = [0.0] * (groups - len(self._means))
        self._variances, self._means = self._variances + more, self._means + more

    def advance(self, worth: float) -> None:
        """Count a step that was made with this gain."""
        self.steps += worth

    @property
    def value(self) -> float:
        """The gain over all groups, between 1 and scale; 1 before the first estimate."""
        return self._ratio(sum(self._variances), sum(self._means))

    def of_group(self, group: int) -> float:
        """The gain of one group, between 1 and scale."""
        return self._ratio(self._variances[group], self._means[group])

    @property
    def variance(self) -> float:
        """sigma^2 over all groups, of one base batch; 0 before the first estimate."""
        return max(sum(self._variances), 0.0) / (self._weight or 1.0)

    @property
    def mean(self) -> float:
        """mu^2 over all groups; 0 before the first estimate."""
        return max(sum(self._means), 0.0) / (self._weight or 1.0)

    @property
    def noise_scale(self) -> float:
        """Base batches whose mean has as much noise as signal, sigma^2 / mu^2: the gradient noise scale."""
        return self.variance / self.mean if self.mean > 0 else math.inf if self.variance > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Equal on all ranks."""
        return {
            "scale": self.scale,
            "micro_batches": self.micro_batches,
            "steps": self.steps,
            "variances": list(self._variances),
            "means": list(self._means),
            "weight": self._weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave; the variance follows a base batch of more or fewer micro-batches."""
        if len(state["means"]) != len(self._means):
            raise ValueError(
                f"Gain: expected a state of {len(self._means)} parameter groups, got one of {len(state['means'])}:"
                " it belongs to another optimizer"
            )
        factor = state["micro_batches"] / state["scale"] / (self.micro_batches / self.scale)
        self.steps, self._weight = float(state["steps"]), float(state["weight"])
        self._variances = [float(x) * factor for x in state["variances"]]
        self._means = [float(x) for x in state["means"]]

    def _ratio(self, variance: float, mean: float) -> float:
        variance, mean = max(variance, 0.0), max(mean, 0.0)
        total = variance + mean
        if not total > 0:
            return 1.0
        low, high = sorted((1.0, self.scale))
        return min(high, max(low, total / (variance / self.scale + mean)))


def check_scale(scale: float, micro_batches: int, smoothing: float | None) -> None:
    """Raise ValueError unless a gain can be estimated from so many micro-batches."""
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 2:
        raise ValueError(
            f"AdaScale: expected at least 2 micro-batches a step, to tell noise from signal, got {micro_batches!r}:"
            " train on more ranks, or accumulate gradients over more passes"
        )
    if not (isinstance(scale, (int, float)) and not isinstance(scale, bool) and 1 < scale < math.inf):
        raise ValueError(
            f"AdaScale: scale must be above 1, got {scale!r}: give the batch of one step over the base batch"
        )
    if smoothing is not None and not 0 <= smoothing < 1:
        raise ValueError(f"AdaScale: smoothing must be in [0, 1) or None, got {smoothing!r}")
