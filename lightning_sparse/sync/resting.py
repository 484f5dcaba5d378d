"""Resting: while DDP averages gradients, the anchor is the weights themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.finite import are_finite
from lightning_sparse.protocols import Transport
from lightning_sparse.reducer import Reducer
from lightning_sparse.sync import saved
from lightning_sparse.sync.buffers import average
from lightning_sparse.sync.group import Group


class Resting:
    """Between two times of exchanging progress: ranks have equal weights and equal optimizers.

    Args:
        groups: of all optimizers; nothing is in flight.
        optimizers: theirs.
        reducer: averages what ranks owe.
    """

    def __init__(self, groups: Mapping[int, Group], optimizers: Sequence[Optimizer], reducer: Reducer) -> None:
        self._groups = groups
        self._optimizers = optimizers
        self._reducer = reducer

    @torch.no_grad()
    def begin(self) -> bool:
        """Make ranks equal in weights and optimizer state; False, and nothing is changed, if they keep unlike states.

        Every rank calls it.
        """
        transport = self._reducer.transport
        if not self._reducer.call(lambda: agree_on_optimizers(self._optimizers, transport)):
            return False
        owed = saved.owed(self._groups.values(), transport.world_size)
        parts = [owed[kind][name] for kind in sorted(owed) for name in sorted(owed[kind])]
        self._reducer.call(lambda: average(parts, transport))
        if not are_finite(parts):
            # the mean, so every rank raises
            raise FloatingPointError("Updates: expected finite weights on every rank, got NaN or inf on at least one")
        saved.load_owed(self._groups.values(), owed)
        for group in self._groups.values():
            group.rest()
        rescale(self._groups.values(), self._optimizers, -2)
        return True

    @torch.no_grad()
    def before_step(self, group: Group) -> None:
        """The anchor is where the weights are, also of parameters that have joined."""
        group.alias()

    @torch.no_grad()
    def end(self) -> None:
        """The anchor is a copy again."""
        for group in self._groups.values():
            group.anchor_here()
        rescale(self._groups.values(), self._optimizers, 2)


@torch.no_grad()
def rescale(groups: Iterable[Group], optimizers: Iterable[Optimizer], power: int) -> None:
    """Second moments of one rank's gradient become those of the mean's, whose noise is smaller, or the reverse.

    With rho the share of its energy that survives averaging, that is a factor of rho, and steps were stretched by
    ``scale = rho ** -0.5``.

    Args:
        groups: know the scales.
        optimizers: hold the moments.
        power: of the scale: -2 for the mean's, 2 for one rank's.
    """
    scales: dict[int, float] = {}
    for group in groups:
        scales |= {id(group.parameters[name]): scale for name, scale in group.lr_scales().items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key in ("exp_avg_sq", "max_exp_avg_sq"):
                if isinstance(x := state.get(key), Tensor):
                    x.mul_(scales.get(id(parameter), 1.0) ** power)


def agree_on_optimizers(optimizers: Iterable[Optimizer], transport: Transport) -> bool:
    """Make optimizer states equal on all ranks, in place: the mean of tensors, rank 0's counters and numbers.

    Returns:
        False, with nothing changed, if states are not of one shape on all ranks, or hold what no mean exists of:
        tensors of integers, or containers.
    """
    places = [place for optimizer in optimizers for place in _places(optimizer)]
    values = [mapping[key] for _, mapping, key in places]
    shapes = [(path, _shape(x)) for (path, _, _), x in zip(places, values, strict=True)]
    tensors = [x for x in values if isinstance(x, Tensor) and x.ndim]
    known: list[Any] = [None] * transport.world_size
    is_plain = all(map(_is_plain, values))
    dist.all_gather_object(known, (shapes, is_plain and all(x.is_floating_point() for x in tensors)))
    if any(theirs != (shapes, True) for theirs in known):
        return False
    average(tensors, transport)
    small = [[_number(x) for x in values]]
    dist.broadcast_object_list(small, src=0)
    _write(places, small[0])
    return True


def _places(optimizer: Optimizer) -> list[tuple[str, Any, Any]]:
    """Every entry of the state and of the options, as (path, mapping, key), in one order on all ranks."""
    out: list[tuple[str, Any, Any]] = []
    for i, entry in enumerate(optimizer.param_groups):
        out += [(f"group {i} {key}", entry, key) for key in sorted(entry) if key != "params"]
        for j, parameter in enumerate(entry["params"]):
            state = optimizer.state.get(parameter, {})
            out += [(f"group {i} parameter {j} {key}", state, key) for key in sorted(state)]
    return out


def _shape(x: Any) -> Any:
    return (tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__


def _is_plain(x: Any) -> bool:
    """A tensor, or nothing that could hold one."""
    return isinstance(x, (Tensor, bool, int, float, str, type(None))) or (
        isinstance(x, tuple) and all(isinstance(y, (int, float)) for y in x)
    )


def _number(x: Any) -> Any:
    """A number, or None for what is averaged or of another kind."""
    if isinstance(x, Tensor):
        return None if x.ndim else x.item()
    return x if isinstance(x, (bool, int, float)) else None


def _write(places: Sequence[tuple[str, Any, Any]], values: Sequence[Any]) -> None:
    for (_, mapping, key), value in zip(places, values, strict=True):
        if value is None:
            continue
        if isinstance(mapping[key], Tensor):
            mapping[key].fill_(value)
        else:
            mapping[key] = value
