"""Squared norms of gradients by parameter group, over a whole step and pass by pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[Mapping[str, Any]]
"""An optimizer's ``param_groups``."""


def squares(tensors: Iterable[Tensor]) -> Tensor:
    """The squared norm of each tensor: [tensors], on their device. Reads each once; the host does not wait.

    In float32, or float64 if one of the tensors is.
    """
    dense = [x.coalesce().values() if x.is_sparse else x for x in tensors]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in dense) else torch.float32
    return torch.stack(torch._foreach_norm(dense, 2, dtype=dtype)).square()


def gradients(groups: Groups) -> dict[int, tuple[Tensor, int]]:
    """The gradients that are there, with the parameter group of each, by the parameter's identity."""
    return {id(p): (p.grad, at) for at, group in enumerate(groups) for p in group["params"] if p.grad is not None}


def device_of(groups: Groups) -> torch.device:
    """Where the first parameter lives."""
    return next((p.device for group in groups for p in group["params"]), torch.device("cpu"))


def group_squares(groups: Groups) -> Tensor:
    """The squared norm of each parameter group's gradient: [groups]; NaN if no gradient is there."""
    found = gradients(groups).values()
    if not found:
        return torch.full((len(groups),), torch.nan, device=device_of(groups))
    return by_group(squares(gradient for gradient, _ in found), [at for _, at in found], len(groups))


def by_group(values: Tensor, owner: Sequence[int], groups: int) -> Tensor:
    """The sum of the rows that each group owns: [groups, ...] from [rows, ...]."""
    out = values.new_zeros(groups, *values.shape[1:])
    return out.index_add_(0, torch.tensor(owner, device=values.device), values)


class Passes:
    """The squared norm of what each backward pass adds to the gradients of a step.

    Keeps one copy of the gradients. It makes no difference whether the loss is divided by the number of passes, but for
    a factor that all norms have in common.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._before: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, groups: Groups, loss_scale: float = 1.0) -> None:
        """Behind each backward pass of a step; ``loss_scale`` is the factor on the gradients now."""
        now = {key: (x.to_dense() if x.is_sparse else x, at) for key, (x, at) in gradients(groups).items()}
        added = [x - self._before[key] if key in self._before else x for key, (x, _) in now.items()]
        sums = torch.zeros(len(groups), device=device_of(groups))
        if added:
            sums = by_group(squares(added), [at for _, at in now.values()], len(groups)) / loss_scale**2
        self._sums.append(sums)
        self._before = {key: x.clone() for key, (x, _) in now.items()}

    def take(self) -> tuple[Tensor, int]:
        """The mean over passes of the squared norms, [groups], and how many there were; then start anew."""
        sums, self._sums, self._before = self._sums, [], {}
        return (torch.stack(sums).mean(0) if sums else torch.zeros(0)), len(sums)
