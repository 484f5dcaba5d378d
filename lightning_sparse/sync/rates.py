"""Rates: learning rates that are scaled, parameter by parameter, while an optimizer moves its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]


def check_rates(optimizer: Optimizer) -> None:
    """Raise ValueError unless every group has a learning rate that can be scaled."""
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            f"Updates: expected a learning rate in every group of {type(optimizer).__name__}, got none:"
            " pass exchange=Updates(lr_scale=1)"
        )


class Rates:
    """Puts factors on the learning rates of one optimizer at a time, and takes them off again.

    Parameters of one group that have different factors are put into groups of their own meanwhile.
    """

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None
        self._groups: list[tuple[Group, list[Group]]] = []

    def scale(self, optimizer: Optimizer, factor: Callable[[Tensor], float]) -> None:
        """Multiply learning rates, after ``restore``: a step that failed may have left them scaled.

        Raises:
            ValueError: a group has no learning rate.
        """
        self.restore()
        factors = [[factor(p) for p in group["params"]] for group in optimizer.param_groups]
        if all(by == 1 for row in factors for by in row):
            return
        check_rates(optimizer)
        groups = []
        for group, row in zip(optimizer.param_groups, factors, strict=True):
            shares: dict[float, list[Tensor]] = {}
            for parameter, by in zip(group["params"], row, strict=True):
                shares.setdefault(by, []).append(parameter)
            parts = [{**group, "params": share, "lr": group["lr"] * by} for by, share in sorted(shares.items())]
            groups.append((group, parts or [{**group}]))
        self._optimizer, self._groups = optimizer, groups
        # in place, as others may hold the list
        optimizer.param_groups[:] = [part for _, parts in groups for part in parts]

    def restore(self) -> None:
        """The groups as they were; what the optimizer noted in one of their parts stays noted."""
        if self._optimizer is None:
            return
        known = {id(part) for _, parts in self._groups for part in parts}
        added = [group for group in self._optimizer.param_groups if id(group) not in known]
        for group, parts in self._groups:
            notes = {key: value for key, value in parts[0].items() if key not in ("params", "lr")}
            group.update(notes)
        self._optimizer.param_groups[:] = [*(group for group, _ in self._groups), *added]
        self._optimizer, self._groups = None, []
