"""Schedules: functions from a step (own counter, from 0) to a number. Any callable will do; these are common ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from lightning_sparse.protocols import Schedule


def constant(value: float) -> Schedule:
    """The same value at every step."""
    return partial(_constant, value)


def exponential_warmup(final: float, steps: int, start: float = 0.25) -> Schedule:
    """From ``start`` geometrically down to ``final`` over ``steps`` steps, then ``final``.

    Raises:
        ValueError: a density outside (0, 1], or ``steps`` below 0.

    Source: Lin et al., "Deep Gradient Compression", https://arxiv.org/abs/1712.01887, section 3.3 (the paper changes
    the density once an epoch: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %; here it changes at every step).
    """
    for name, value in (("final", final), ("start", start)):
        if not 0 < value <= 1:
            raise ValueError(f"exponential_warmup: {name} must be in (0, 1], got {value}")
    if steps < 0:
        raise ValueError(f"exponential_warmup: steps must be at least 0, got {steps}")
    return partial(_exponential, final, steps, start)


def piecewise(values: Mapping[int, float]) -> Schedule:
    """The value of the largest key that the step has reached: ``piecewise({0: 1.0, 100: 0.01})``.

    Raises:
        ValueError: no value for step 0.
    """
    if 0 not in values:
        raise ValueError(f"piecewise: expected a value for step 0, got steps {sorted(values)}")
    return partial(_piecewise, dict(values))


def cycle(*values: float) -> Schedule:
    """The values in turn, one a step: ``cycle(1.0, 0.5)`` is 1 at every second step.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("cycle: expected at least one value, got none")
    return partial(_cycle, values)


# module-level functions, so that schedules can be pickled to spawned ranks
def _constant(value: float, step: int) -> float:
    return value


def _exponential(final: float, steps: int, start: float, step: int) -> float:
    return final if step >= steps else start * (final / start) ** (step / steps)


def _piecewise(values: dict[int, float], step: int) -> float:
    return values[max(key for key in values if key <= step)]


def _cycle(values: tuple[float, ...], step: int) -> float:
    return values[step % len(values)]
