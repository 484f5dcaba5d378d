"""Who rules the learning rate: one callback at a time."""

from __future__ import annotations

from typing import Any


class RulesRates:
    """Marks callbacks that set or scale the learning rates of a run."""

    def check_alone(self, trainer: Any) -> None:
        """Raise ValueError if another callback rules the learning rates as well."""
        others = [x for x in trainer.callbacks if isinstance(x, RulesRates) and x is not self]
        if others:
            mine, theirs = type(self).__name__, type(others[0]).__name__
            raise ValueError(
                f"{mine}: expected to be the only callback that rules the learning rate, got {theirs} beside it:"
                f" both would change it for the same reason; keep one of them"
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
