"""Weights and buffers of a module, made equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sparse.protocols import Transport


def share_buffers(module: nn.Module, transport: Transport) -> None:
    """Average the running statistics of batch norms over ranks, and take every other buffer from rank 0. In place.

    Every rank calls it. One message for each dtype and kind, as DDP broadcasts buffers.
    """
    averaged: list[Tensor] = []
    copied: list[Tensor] = []
    for child in module.modules():
        for buffer in child.buffers(recurse=False):
            is_statistic = isinstance(child, _BatchNorm) and buffer.is_floating_point()
            (averaged if is_statistic else copied).append(buffer)
    average(averaged, transport)
    for buffers in _by_dtype(copied).values():
        _write(buffers, transport.broadcast_(_read(buffers)))


def broadcast_state(module: nn.Module, transport: Transport) -> None:
    """Take rank 0's parameters and buffers, in place, as DDP does when it wraps a module. Every rank calls it."""
    for group in _by_dtype((*module.parameters(), *module.buffers())).values():
        _write(group, transport.broadcast_(_read(group)))


def average(tensors: list[Tensor], transport: Transport) -> None:
    """The mean over ranks, in place, in one message for each dtype. Every rank calls it with the same tensors."""
    for group in _by_dtype(tensors).values():
        _write(group, transport.all_reduce_mean_(_read(group)))


def _by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    return groups


def _read(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in buffers])


def _write(buffers: list[Tensor], flat: Tensor) -> None:
    for buffer, new in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(new.view_as(buffer))
