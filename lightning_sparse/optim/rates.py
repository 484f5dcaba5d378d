"""Learning rates that are changed for one step and put back behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Borrowed:
    """The learning rates of an optimizer's groups, multiplied until they are given back: the same objects as before."""

    def __init__(self) -> None:
        self._own: list[tuple[dict[str, Any], Any, Any]] = []

    def multiply(self, groups: Sequence[dict[str, Any]], factors: Sequence[float]) -> None:
        """``lr *= factor`` for each group; numbers or tensors."""
        self.give_back()
        for group, factor in zip(groups, factors, strict=True):
            own = group["lr"]
            group["lr"] = own * factor
            self._own.append((group, own, group["lr"]))

    def give_back(self) -> None:
        """Every rate is what it was, unless somebody has set another one. Nothing happens if none was taken."""
        taken, self._own = self._own, []
        for group, own, borrowed in taken:
            if group["lr"] is borrowed:
                group["lr"] = own
