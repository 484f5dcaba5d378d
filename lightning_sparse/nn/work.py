"""Work: multiply-adds that a layer has done, beside those of the dense layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """Multiply-adds of matrix products so far; products of elements are not counted.

    Args:
        done: those that ran.
        dense: those of the dense layer for the same calls.

    Example:
        >>> work = Work()
        >>> work.add(done=30, dense=100)
        >>> work.skipped
        70
    """

    done: int = 0
    dense: int = 0

    @property
    def skipped(self) -> int:
        """Those that the dense layer would have done besides."""
        return self.dense - self.done

    def add(self, done: int, dense: int) -> None:
        """Count a call."""
        self.done += done
        self.dense += dense
