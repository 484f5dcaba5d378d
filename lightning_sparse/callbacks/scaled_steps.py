"""ScaledSteps: learning rates that are multiplied while an optimizer steps, and are the scheduler's own otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from lightning_sparse.optim.rates import Borrowed

log = logging.getLogger(__name__)


class ScaledSteps:
    """Multiplies the learning rates of an optimizer during each step, whoever makes it.

    Outside of steps the groups hold what they held before, so schedulers that compute the next rate from the last one
    never see the factor, and it cannot compound. A rate that is set within a step, where the factor is in force, stays
    as it is, and is warned of once.

    Args:
        optimizer: any.
        factor: asked before each step, for one number or one of each group.
        stepped: told after each step.
        owner: whose name a warning has.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Callable[[], float | Sequence[float]],
        stepped: Callable[[], None],
        owner: str,
    ) -> None:
        self._optimizer, self._factor, self._stepped, self._owner = optimizer, factor, stepped, owner
        self._rates = Borrowed()
        self._has_warned = False
        self._depth = 0
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._scale()),
            optimizer.register_step_post_hook(lambda *_: self._end()),
        ]

    def restore(self) -> None:
        """Between steps: put back the groups' own rates, if a step was left by an exception."""
        self._depth = 0
        self._rates.give_back()

    def close(self) -> None:
        """Let go of the optimizer."""
        self.restore()
        for handle in self._handles:
            handle.remove()

    def _scale(self) -> None:
        # torch calls the hooks again where a subclass calls the step of its parent
        self._depth += 1
        if self._depth > 1:
            return
        factor, groups = self._factor(), self._optimizer.param_groups
        self._rates.multiply(groups, factor if isinstance(factor, Sequence) else [factor] * len(groups))

    def _end(self) -> None:
        self._depth -= 1
        if not self._depth:
            if self._rates.give_back() and not self._has_warned:
                self._has_warned = True
                log.warning(
                    f"{self._owner}: expected learning rates that stay while the optimizer steps, got one that was set"
                    " within its step, where it goes without the factor: set it in on_train_batch_start, or by a"
                    " scheduler"
                )
            self._stepped()
