"""What a checkpoint holds of one rank in the updates exchange, over all of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lightning_sparse.memory import fold
from lightning_sparse.protocols import Owed
from lightning_sparse.sync.group import Group


@torch.no_grad()
def own_state(groups: Iterable[Group]) -> dict[str, dict[str, Tensor]]:
    """Own weights, and what averaging has rounded away on this rank."""
    states = [group.own_state() for group in groups]
    return {kind: _union(state[kind] for state in states) for kind in ("weights", "lost")}


@torch.no_grad()
def load_own_state(groups: Iterable[Group], state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Take over what ``own_state`` gave."""
    for group in groups:
        _replace(group, state["weights"], lambda own, anchor: own)
        group.anchor.load_lost({name: x for name, x in state["lost"].items() if name in group.parameters})


@torch.no_grad()
def owed(groups: Iterable[Group], world_size: int) -> Owed:
    """Progress that is still to be shared."""
    known = list(groups)
    lost = _union(group.anchor.state_dict()["lost"] for group in known)
    return fold({"progress": _union(group.owed() for group in known)}, "progress", lost, world_size)


@torch.no_grad()
def load_owed(groups: Iterable[Group], debts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Be this far ahead of the anchor."""
    for group in groups:
        _replace(group, debts["progress"], lambda progress, anchor: anchor + progress)
        group.anchor.load_lost({})


def _replace(group: Group, parts: Mapping[str, Tensor], weight: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Make this rank's weights ``weight(part, anchor)``: every parameter has a part."""
    for name, (view, anchor) in zip(group.parameters, group.pairs(), strict=True):
        if name not in parts:
            raise ValueError(
                f"Updates: expected {view.numel()} elements for parameter {name!r} in the checkpoint, got none:"
                " it belongs to another model, or is damaged"
            )
        view.copy_(weight(parts[name].to(view.device), anchor))


def _union(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: x for part in parts for name, x in part.items()}
