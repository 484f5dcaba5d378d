"""Rates: learning rates that are scaled while an optimizer steps."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Rates:
    """Puts a factor on the learning rates of one optimizer at a time, and takes it off again."""

    def __init__(self) -> None:
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []

    def scale(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply every group's learning rate, after ``restore``: a step that failed may have left them scaled.

        Raises:
            ValueError: a group has no learning rate.
        """
        self.restore()
        if factor == 1:
            return
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None:
                raise ValueError(
                    f"Updates: expected a learning rate in every group of {type(optimizer).__name__}, got none:"
                    " pass exchange=Updates(lr_scale=1)"
                )
            group["lr"] = rate * factor
            self._scaled.append((group, rate, group["lr"]))

    def restore(self) -> None:
        """Take the factor off. A rate that was set since is the user's, and stays."""
        for group, rate, scaled in self._scaled:
            if group["lr"] is scaled:
                group["lr"] = rate
        self._scaled = []
