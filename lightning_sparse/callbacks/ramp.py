"""Ramp: a factor that moves in a straight line to where it belongs, from wherever it is."""

from __future__ import annotations

from collections.abc import Mapping


class Ramp:
    """Begins at 1. A new target starts a new line from the factor in force.

    Args:
        length: of a line, in any unit; 0 jumps.

    Example:
        >>> ramp = Ramp(4)
        >>> ramp.aim(3.0)
        >>> ramp.advance(1), ramp.factor
        (None, 1.5)
        >>> ramp.advance(3), ramp.factor
        (None, 3.0)
    """

    def __init__(self, length: float) -> None:
        self._length = length
        self._start = self._target = 1.0
        self._progress = 0.0

    @property
    def factor(self) -> float:
        """In force now."""
        if self._progress >= self._length:
            return self._target
        return self._start + (self._target - self._start) * (self._progress / self._length)

    def aim(self, target: float) -> None:
        """Move to this factor; nothing changes if the ramp is on its way there."""
        if target != self._target:
            self._start, self._target, self._progress = self.factor, target, 0.0

    def advance(self, units: float) -> None:
        """One part of the way is over."""
        self._progress += units

    def state_dict(self) -> dict[str, float]:
        """Where it is."""
        return {"start": self._start, "target": self._target, "progress": self._progress}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over what ``state_dict`` gave."""
        self._start, self._target, self._progress = state["start"], state["target"], state["progress"]
