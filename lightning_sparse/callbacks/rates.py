"""Who owns the learning rate: one callback at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_alone(callback: Any, company: Iterable[Any], what: str = "the learning rate") -> None:
    """Raise ValueError if another of these callbacks or optimizers sets or scales the learning rates as well."""
    others = [x for x in company if x is not callback and getattr(x, "owns_learning_rate", False)]
    if others:
        raise ValueError(
            f"{type(callback).__name__}: expected to be alone in setting {what}, got"
            f" {type(others[0]).__name__} too: use one of them"
        )


def bare_optimizer(trainer: Any, owner: str) -> Any:
    """The one optimizer of automatic optimization. Raises ValueError on manual optimization or several of them."""
    if not trainer.lightning_module.automatic_optimization or len(trainer.strategy.optimizers) != 1:
        raise ValueError(
            f"{owner}: expected automatic optimization with one optimizer, got"
            f" automatic_optimization={trainer.lightning_module.automatic_optimization} and"
            f" {len(trainer.strategy.optimizers)} optimizers: step the optimizer by hand without this callback"
        )
    optimizer = trainer.strategy.optimizers[0]
    return getattr(optimizer, "_optimizer", optimizer)
