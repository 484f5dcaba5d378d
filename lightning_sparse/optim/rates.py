"""Learning rates that are changed for one step and put back behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Borrowed:
    """The learning rates of an optimizer's groups, multiplied until they are given back: the same objects as before."""

    def __init__(self) -> None:
        self._own: list[tuple[dict[str, Any], Any, Any, int]] = []

    def multiply(self, groups: Sequence[dict[str, Any]], factors: Sequence[float]) -> None:
        """``lr *= factor`` for each group; numbers or tensors."""
        self.give_back()
        for group, factor in zip(groups, factors, strict=True):
            own = group["lr"]
            group["lr"] = own * factor
            self._own.append((group, own, group["lr"], _version(group["lr"])))

    def give_back(self) -> bool:
        """Every rate is what it was, unless somebody has set another one, which stays. Whether somebody has."""
        taken, self._own = self._own, []
        is_set = False
        for group, own, borrowed, version in taken:
            if group["lr"] is not borrowed:
                is_set = True
                continue
            group["lr"] = own
            if _version(borrowed) != version:
                is_set = True
                own.copy_(borrowed)
        return is_set


def _version(rate: Any) -> int:
    """Counts the changes of a tensor in place."""
    return rate._version if isinstance(rate, Tensor) else 0
