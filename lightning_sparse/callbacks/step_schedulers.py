"""StepSchedulers: schedulers that follow steps of another count than Lightning's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger(__name__)


class StepSchedulers:
    """Takes over what has ``interval="step"``: Lightning, which counts batches, never comes to step it.

    Args:
        configs: the Trainer's ``lr_scheduler_configs``; those taken are changed until ``release``.
        owner: whose name messages have.

    Raises:
        ValueError: a scheduler does not count its steps.
    """

    def __init__(self, configs: Iterable[Any], owner: str) -> None:
        self._taken: list[tuple[Any, int]] = []
        for config in configs:
            name = type(config.scheduler).__name__
            if config.interval != "step" or config.reduce_on_plateau:
                log.warning(f'{owner}: {name} has no interval="step": it follows real epochs, or its metric')
                continue
            if not hasattr(config.scheduler, "last_epoch"):
                raise ValueError(
                    f"{owner}: expected schedulers that count their steps in last_epoch, got {name}: return the"
                    " schedulers in it one by one, or derive yours from LRScheduler"
                )
            self._taken.append((config, config.frequency))
        for config, _ in self._taken:
            config.frequency = sys.maxsize

    def follow(self, made: int, step: Callable[[Any, None], None]) -> None:
        """Step each to where it belongs behind so many steps, one in ``frequency`` of them."""
        for config, frequency in self._taken:
            while config.scheduler.last_epoch < made // frequency:
                step(config.scheduler, None)

    def release(self) -> None:
        """Leave them to Lightning."""
        for config, frequency in self._taken:
            config.frequency = frequency
        self._taken = []
