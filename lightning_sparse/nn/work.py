"""Work: multiply-adds that a layer did and skipped, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Pass:
    """Multiply-adds of one pass: those done, and those that a dense layer would have done beyond them."""

    done: int = 0
    skipped: int = 0

    def add(self, rows: int, done: int, dense: int) -> None:
        """Counts a product of `rows` rows with `done` weights, of the `dense` that there are."""
        self.done += rows * done
        self.skipped += rows * (dense - done)


@dataclass
class Work:
    """Multiply-adds since the last reset, biases left out; plain integers, no device is waited for."""

    forward: Pass = field(default_factory=Pass)
    input_gradient: Pass = field(default_factory=Pass)
    weight_gradient: Pass = field(default_factory=Pass)

    def reset(self) -> None:
        """Sets all counters to zero."""
        self.forward, self.input_gradient, self.weight_gradient = Pass(), Pass(), Pass()
