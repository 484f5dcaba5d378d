"""What ops that move weights have in common: checks, and batches of pieces that fit a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels.pieces import KINDS, check_pairs, check_pieces, check_vectors

CACHED = 1 << 16

Cut = tuple[int, int, int]
"""A piece, and where the cut begins and ends in it."""


def check_scale(name: str, scale: Tensor, pieces: Sequence[Tensor]) -> None:
    """Raises unless `scale` is one fp32 number for each piece, on their device."""
    if scale.dtype != torch.float32 or scale.shape != (len(pieces),):
        raise TypeError(f"{name} must be float32 [{len(pieces)}], got {scale.dtype} {list(scale.shape)}")
    if pieces and scale.device != pieces[0].device:
        raise ValueError(f"{name} must be on {pieces[0].device} like the weights, got {scale.device}")


def check_update(weights: Sequence[Tensor], gradients: Sequence[Tensor], scale: Tensor | None = None) -> torch.device:
    """The device of all pieces; raises unless weights and gradients are like each other, piece by piece."""
    device = check_vectors(weights)
    check_pieces("gradients", gradients, device, list(KINDS))
    left, right = ([(x.numel(), x.dtype) for x in pieces] for pieces in (weights, gradients))
    if left != right:
        raise ValueError(f"weights and gradients must have the same sizes and dtypes, got {left[:4]} and {right[:4]}")
    if scale is not None:
        check_scale("trust", scale, weights)
    return device


def check_moments(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]
) -> torch.device:
    """As `check_update`, with two moments of fp32."""
    check_pairs("weights", weights, "firsts", firsts)
    check_pairs("weights", weights, "seconds", seconds)
    return check_update(weights, gradients)


def batches(pieces: Sequence[Tensor]) -> Iterator[list[Cut]]:
    """Cuts of all pieces in their order, about `CACHED` entries at a time on the CPU; all at once elsewhere."""
    if pieces and pieces[0].device.type != "cpu":
        yield [(i, 0, x.numel()) for i, x in enumerate(pieces)]
        return
    batch: list[Cut] = []
    room = CACHED
    for piece, x in enumerate(pieces):
        for begin in range(0, x.numel(), CACHED):
            end = min(begin + CACHED, x.numel())
            if end - begin > room and batch:
                yield batch
                batch, room = [], CACHED
            batch.append((piece, begin, end))
            room -= end - begin
    if batch:
        yield batch


def take(pieces: Sequence[Tensor], batch: Sequence[Cut]) -> list[Tensor]:
    """The cuts of one batch, as views."""
    return [pieces[piece][begin:end] for piece, begin, end in batch]
