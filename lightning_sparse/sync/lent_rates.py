"""LentRates: learning rates by parameter for the length of one step, for optimizers that take factors this way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_sparse.sync.closures import behind_closure

# their steps are proportional to a rate that their state knows nothing of; a subclass may change that
_PROPORTIONAL = (SGD, Adam, AdamW)


class LentRates:
    """Makes the coming step of an optimizer longer by factors on its learning rates, so that no weight is copied.

    While the step is computed, the optimizer has one parameter group for each parameter; hooks, closures and schedulers
    see the groups as they are. On CUDA, where such groups would cost a launch each, nothing is done.
    """

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] | None = None
        self._handles: list[Any] = []
        self.applied: Mapping[str, float] = {}
        """Factors, by name, that the last step was made with."""

    def arm(self, optimizer: Optimizer, parameters: Mapping[str, Tensor], factors: Mapping[str, float]) -> bool:
        """Before a step that ``disarm`` will be called after, come what may.

        Returns:
            False if this optimizer's step must be stretched in another way.
        """
        self.applied = {}
        if not factors:
            return True
        if type(optimizer) not in _PROPORTIONAL or any(p.device.type != "cpu" for p in parameters.values()):
            return False
        by_id = {id(parameters[name]): factor for name, factor in factors.items()}

        def lend() -> None:
            if self._groups is not None:
                return
            self._groups, self.applied = optimizer.param_groups, factors
            optimizer.param_groups = [
                {**group, "params": [p], "lr": group["lr"] * by_id.get(id(p), 1.0)}
                for group in self._groups
                for p in group["params"]
            ]

        self._handles = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: behind_closure(args, kwargs, lend)),
            optimizer.register_step_post_hook(lambda *_: self._take_back(optimizer)),
        ]
        return True

    def disarm(self, optimizer: Optimizer) -> None:
        """The step has ended, was skipped, or has raised."""
        self._take_back(optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take_back(self, optimizer: Optimizer) -> None:
        if self._groups is not None:
            optimizer.param_groups, self._groups = self._groups, None
