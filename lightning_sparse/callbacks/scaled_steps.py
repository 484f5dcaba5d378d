"""ScaledSteps: learning rates that are multiplied while an optimizer steps, and are the scheduler's own otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from lightning_sparse.optim.rates import Borrowed


class ScaledSteps:
    """Multiplies the learning rates of an optimizer during each step, whoever makes it.

    Outside of steps the groups hold what they held before, so schedulers that compute the next rate from the last one
    never see the factor, and it cannot compound.

    Args:
        optimizer: any.
        factor: asked before each step, for one number or one of each group.
        stepped: told after each step.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[], float | Sequence[float]], stepped: Callable[[], None]
    ) -> None:
        self._optimizer, self._factor, self._stepped = optimizer, factor, stepped
        self._rates = Borrowed()
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
            self._rates.give_back()
            self._stepped()
