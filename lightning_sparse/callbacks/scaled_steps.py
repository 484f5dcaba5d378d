"""ScaledSteps: learning rates that are multiplied while an optimizer steps, and are the scheduler's own otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class ScaledSteps:
    """Multiplies all learning rates of an optimizer by one factor during each step, whoever makes it.

    Outside of steps the groups hold what they held before, so schedulers that compute the next rate from the last one
    never see the factor, and it cannot compound.

    Args:
        optimizer: any; groups keep the ratios of their rates.
        factor: asked before each step.
        stepped: told after each step.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[], float], stepped: Callable[[], None]) -> None:
        self._optimizer, self._factor, self._stepped = optimizer, factor, stepped
        self._own: list[Any] | None = None
        self._depth = 0
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._scale()),
            optimizer.register_step_post_hook(lambda *_: self._end()),
        ]

    def restore(self) -> None:
        """Between steps: put back the groups' own rates, if a step was left by an exception."""
        self._depth = 0
        own, self._own = self._own, None
        if own is not None:
            for group, lr in zip(self._optimizer.param_groups, own, strict=False):
                group["lr"] = lr

    def close(self) -> None:
        """Let go of the optimizer."""
        self.restore()
        for handle in self._handles:
            handle.remove()

    def _scale(self) -> None:
        # torch calls the hooks again where a subclass calls the step of its parent
        self._depth += 1
        if self._depth > 1:
            return
        factor = self._factor()
        self._own = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.restore()
            self._stepped()
