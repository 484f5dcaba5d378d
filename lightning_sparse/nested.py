"""Walks over what checkpoints are made of: tensors and plain values in mappings, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def mapped(state: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda x: x) -> Any:
    """The same containers, with what ``tensor`` makes of each tensor and ``other`` of everything else."""
    if isinstance(state, Tensor):
        return tensor(state)
    if isinstance(state, Mapping):
        return {key: mapped(x, tensor, other) for key, x in state.items()}
    return type(state)(mapped(x, tensor, other) for x in state) if isinstance(state, (list, tuple)) else other(state)


def tensors(state: Any) -> list[Tensor]:
    """All tensors, in the order of the containers."""
    found: list[Tensor] = []
    mapped(state, found.append)
    return found
