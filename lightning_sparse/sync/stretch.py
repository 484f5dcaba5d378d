"""Stretch: steps that were made are made longer, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Stretch:
    """Moves weights on along the step they have just made: ``p = before + factor * (p - before)``.

    For an optimizer whose step is proportional to its learning rate this is a factor on the learning rate; learning
    rates themselves, groups and optimizer state stay as they are. Holds a copy of the weights that have a factor.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._factors: dict[str, float] = {}

    def before_step(self, weights: Mapping[str, Tensor], factors: Mapping[str, float]) -> None:
        """Remember the weights of each factor, by name: [n] each. What an earlier step has left is forgotten."""
        self._factors = dict(factors)
        for name in self._factors:
            if name in self._before:
                self._before[name].copy_(weights[name])
            else:
                self._before[name] = weights[name].clone()

    def after_step(self, weights: Mapping[str, Tensor]) -> None:
        """Stretch the step, in place."""
        for name, factor in self._factors.items():
            weights[name].lerp_(self._before[name], 1 - factor)
        self._factors = {}
