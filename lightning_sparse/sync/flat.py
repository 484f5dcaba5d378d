"""Flat views of parameters, and which of them are averaged densely."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_view(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in storage order, sharing its memory: [n].

    Raises:
        ValueError: the tensor has gaps or overlaps in memory, so no such view exists.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    # channels_last and the like: the same elements without gaps, in another order
    strides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            raise ValueError(
                f"expected a parameter without gaps in memory, got shape {tuple(tensor.shape)}"
                f" with strides {tensor.stride()}: make it contiguous"
            )
        expected *= size
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def check_dense_below(owner: str, dense_below: object) -> None:
    """Raise ValueError unless ``dense_below`` is an integer of at least 0."""
    if isinstance(dense_below, bool) or not isinstance(dense_below, int) or dense_below < 0:
        raise ValueError(f"{owner}: dense_below must be at least 0, got {dense_below!r}: give an integer")


def is_small(tensor: Tensor, dense_below: int) -> bool:
    """Whether a parameter of this shape is averaged densely: vectors, scalars and small matrices; none below 1."""
    return dense_below > 0 and (tensor.ndim < 2 or tensor.numel() < dense_below)
