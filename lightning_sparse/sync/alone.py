"""Alone: one rank has nothing to exchange, but its gradients may be bad as well."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_sparse.finite import gradients_are_finite


class Alone:
    """Counts steps, and looks for gradients that are not finite."""

    def __init__(self) -> None:
        self.steps = 0

    def before_step(self, optimizer: Optimizer, announced: bool = False) -> None:
        """Nothing to prepare."""

    def end_step(self, optimizer: Optimizer) -> None:
        """Nothing: the optimizer is as it was."""

    def after_step(self, optimizer: Optimizer) -> None:
        self.steps += 1

    def refuses(self, optimizer: Optimizer) -> bool:
        return not gradients_are_finite(optimizer)

    def give_up(self, message: str) -> None:
        raise FloatingPointError(message)
