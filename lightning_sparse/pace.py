"""Pace: times the steps of a training for the guard."""

from __future__ import annotations

import time

from lightning_sparse.guard import Guard
from lightning_sparse.reducer import Reducer
from lightning_sparse.sync.steps import Steps


class Pace:
    """Feeds a guard.

    Args:
        guard: decides.
        reducer: counts what the exchange works.
        steps: counts how long training waits for it.
    """

    def __init__(self, guard: Guard, reducer: Reducer, steps: Steps) -> None:
        self.guard = guard
        self._reducer = reducer
        self._steps = steps
        self._last = self._now()

    def lap(self) -> bool:
        """After each step: whether to change over, as ``Guard.lap``."""
        now = self._now()
        seconds, worked, waited = (x - before for x, before in zip(now, self._last, strict=True))
        self._last = now
        # beside the computation, or in its way
        return self.guard.lap(seconds, min(seconds, max(worked, waited)))

    def _now(self) -> tuple[float, float, float]:
        worked = sum(self._reducer.snapshot()[0].seconds.values())
        return time.perf_counter(), worked, self._steps.seconds
