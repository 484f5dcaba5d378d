"""AnchorFirst: shows the weights that ranks share before any other callback looks at them."""

from __future__ import annotations

from typing import Any


class AnchorFirst:
    """Put first in the Trainer's callbacks by the strategy, which returns to the rank's own weights after the last."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.enter_shared()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.finish()
