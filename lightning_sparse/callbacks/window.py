"""Window: what was exchanged between two looks at a running strategy."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightning_sparse.communicators.volume import ring_bytes
from lightning_sparse.job import Picked
from lightning_sparse.strategy import SparseDDP


@dataclass(frozen=True)
class Traffic:
    """What the exchanges that ended within a window brought, on this rank.

    Args:
        steps: that those exchanges belong to.
        bytes_per_step: sent + received, everything included.
        dense_bytes_per_step: what a ring all-reduce of the same float32 gradients moves.
        shares: time of each stage over the time of the window; a stage that runs beside the training step counts whole.
        last: the newest exchange of each name.
    """

    steps: float
    bytes_per_step: float
    dense_bytes_per_step: int
    shares: dict[str, float]
    last: dict[str, Picked]


@dataclass(frozen=True)
class _Mark:
    steps: float
    bytes: int
    seconds: dict[str, float]
    time: float


class Window:
    """Reads the sums of a strategy's reducer, without waiting for an exchange in flight.

    Open it before the first step of a ``fit``. Seconds are those of the host's clock.

    Args:
        strategy: connected to a reducer.
    """

    stages = ("select", "encode", "exchange", "decode")

    def __init__(self, strategy: SparseDDP) -> None:
        if strategy.reducer is None or strategy.tap is None:
            raise RuntimeError("Window: expected a strategy that exchanges, got one that is not set up: open it later")
        self._reducer, self._tap = strategy.reducer, strategy.tap
        self._dense: int = strategy.summary()["dense_bytes_per_step"]
        self._first = self._tap.steps
        self._paused: float | None = None
        moved = self._moved(self._reducer.transport.bytes)
        self._mark = _Mark(0.0, moved, dict.fromkeys(self.stages, 0.0), time.perf_counter())

    def look(self, restart: bool = True) -> Traffic | None:
        """What has ended since the window was opened or restarted; None, and no restart, if no exchange has."""
        totals, last = self._reducer.snapshot()
        # an exchange in flight belongs to no window yet, so its steps must not either
        steps = (self._tap.steps - self._first) * totals.exchanges / max(1, totals.submitted)
        mark = _Mark(steps, self._moved(totals.bytes), {s: totals.seconds[s] for s in self.stages}, time.perf_counter())
        before = self._mark
        passed, elapsed = mark.steps - before.steps, mark.time - before.time
        if passed <= 0 or elapsed <= 0:
            return None
        if restart:
            self._mark = mark
        shares = {stage: (mark.seconds[stage] - before.seconds[stage]) / elapsed for stage in self.stages}
        return Traffic(passed, (mark.bytes - before.bytes) / passed, self._dense, shares, last)

    def pause(self) -> None:
        """Stop the clock, for validation."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Let the clock run on."""
        if self._paused is not None:
            skipped, self._paused = time.perf_counter() - self._paused, None
            mark = self._mark
            self._mark = _Mark(mark.steps, mark.bytes, mark.seconds, mark.time + skipped)

    def _moved(self, counted: int) -> int:
        """Gradients that DDP averages where the guard has changed over pass the reducer by."""
        return counted + ring_bytes(self._tap.beside, self._reducer.transport.world_size)
