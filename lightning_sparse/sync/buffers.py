"""Weights and buffers of a module, made equal on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sparse.protocols import Transport


def share_buffers(module: nn.Module, transport: Transport) -> None:
    """Average the running statistics of batch norms over ranks, and take every other buffer from rank 0. In place.

    Every rank calls it. One message for each dtype and kind, as DDP broadcasts buffers.
    """
    averaged: dict[torch.dtype, list[Tensor]] = {}
    copied: dict[torch.dtype, list[Tensor]] = {}
    for child in module.modules():
        for buffer in child.buffers(recurse=False):
            kind = averaged if isinstance(child, _BatchNorm) and buffer.is_floating_point() else copied
            kind.setdefault(buffer.dtype, []).append(buffer.detach())
    for buffers in averaged.values():
        _write(buffers, transport.all_reduce_mean_(_read(buffers)))
    for buffers in copied.values():
        _write(buffers, transport.broadcast_(_read(buffers)))


def broadcast_state(module: nn.Module, transport: Transport) -> None:
    """Take rank 0's parameters and buffers, in place, as DDP does when it wraps a module. Every rank calls it."""
    tensors: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        tensors.setdefault(tensor.dtype, []).append(tensor.detach())
    for group in tensors.values():
        _write(group, transport.broadcast_(_read(group)))


def _read(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in buffers])


def _write(buffers: list[Tensor], flat: Tensor) -> None:
    for buffer, new in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(new.view_as(buffer))
