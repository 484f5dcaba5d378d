"""Stopwatch: what every training step took, and moved over the interface, without validation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, Trainer

Sample = dict[str, float]


class Stopwatch(Callback):
    """Keeps a lap for each step, from the start of its batch to the start of the next one, or of validation.

    A lap holds ``seconds``; ``bytes`` sent + received over ``interface`` by whoever uses it; and, of our strategies,
    ``counted_bytes`` and the seconds of each stage of the exchange, such as ``encode_seconds``.

    Args:
        interface: its counters are read; None reads none.
        tick: called after each step.
    """

    def __init__(self, interface: str | None, tick: Callable[[], None]) -> None:
        self.laps: list[Sample] = []
        self.losses: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self._interface = interface
        self._tick = tick
        self._open: Sample | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._close(trainer)
        self._open = self._sample(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self._tick()
        if trainer.global_step >= trainer.max_steps:
            self._close(trainer)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        self._close(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.curve.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def _close(self, trainer: Trainer) -> None:
        if self._open is not None:
            now = self._sample(trainer)
            self.laps.append({key: now[key] - self._open.get(key, 0.0) for key in now})
            self._open = None

    def _sample(self, trainer: Trainer) -> Sample:
        sample = {"seconds": time.perf_counter()}
        if self._interface is not None:
            sample["bytes"] = interface_bytes(self._interface)
        reducer = getattr(trainer.strategy, "reducer", None)
        if reducer is not None:
            sample["counted_bytes"] = reducer.transport.bytes
            totals, _ = reducer.snapshot()
            sample.update({f"{stage}_seconds": seconds for stage, seconds in totals.seconds.items()})
        return sample


def interface_bytes(interface: str, table: Path = Path("/proc/net/dev")) -> int:
    """Bytes sent + received over an interface of this process's network namespace.

    The same counters as in /sys/class/net, which shows the namespace that it was mounted in.
    """
    for line in table.read_text().splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            columns = counters.split()
            return int(columns[0]) + int(columns[8])
    raise ValueError(f"interface_bytes: expected an interface of this host, got {interface!r}")
