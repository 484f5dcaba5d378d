"""Adds a gradient to its velocity, that to the residual, and picks the large entries of it, in one dense pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import load_block, locate, store_block
from lightning_sparse.kernels.compact import compact, pick
from lightning_sparse.kernels.compact_blocks import compact_blocks
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import bounds_of, check_pairs, check_selection, index_dtype

if TYPE_CHECKING:
    import triton.language as tl


@torch.no_grad()
def momentum_select(
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    residuals: Sequence[Tensor],
    momentum: float,
    scale: float,
    threshold: Tensor,
    capacity: int,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes velocity = momentum * velocity + scale * gradient and residual += velocity, and picks as `select` does.

    Both products and both sums are rounded to fp32, one by one: the same bits on every path. Picked entries stay in
    velocity and residual.

    Args:
        gradients: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each; cast to fp32 first.
        velocities: Pieces of the same sizes, [numel of piece] fp32. Modified in place.
        residuals: Pieces of the same sizes, [numel of piece] fp32. Modified in place.
        momentum: Rounded to fp32, as is `scale`.
        threshold: [] fp32 on the same device.
        start: Where the order of taking begins when more than `capacity` qualify, as in `accumulate_select`.

    Returns:
        values [capacity] fp32, indices [capacity], count [] int64 of the residual, as `accumulate_select` does.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size, device, `capacity` or `start` does not fit.
    """
    check_selection("gradients", gradients, threshold, capacity, start)
    check_pairs("gradients", gradients, "velocities", velocities)
    check_pairs("gradients", gradients, "residuals", residuals)
    if use_triton(threshold):
        numbers = float(momentum), float(scale)
        return compact(
            _momentum_select_kernel, gradients, residuals, "y", threshold, capacity, start, velocities, numbers
        )
    return momentum_select_torch(gradients, velocities, residuals, momentum, scale, threshold, capacity, start)


def momentum_select_torch(
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    residuals: Sequence[Tensor],
    momentum: float,
    scale: float,
    threshold: Tensor,
    capacity: int,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`momentum_select` on the CPU, block by block."""

    def fill(piece: int, begin: int, end: int, out: Tensor) -> Tensor:
        gradient, velocity = gradients[piece][begin:end], velocities[piece][begin:end].mul_(momentum)
        # Scaled apart from the sum: `add_` with a factor would round the two once.
        velocity.add_(gradient if scale == 1 else out.copy_(gradient).mul_(scale))
        return residuals[piece][begin:end].add_(velocity)

    bounds = bounds_of(gradients)
    return compact_blocks(fill, bounds, threshold, capacity, start, index_dtype(bounds[-1]))


@jit
def _momentum_select_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr, velocities_ptr,
    momentum, scale, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    piece, gradient_address, kind, residual_address = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    velocity_address = tl.load(velocities_ptr + tl.load(piece_of_block_ptr + block))
    velocity = momentum * load_block(velocity_address, 0, piece, ALIGNED, BLOCK)
    velocity += scale * load_block(gradient_address, kind, piece, ALIGNED, BLOCK)
    store_block(velocity_address, velocity, piece, ALIGNED, BLOCK)
    residual = load_block(residual_address, 0, piece, ALIGNED, BLOCK) + velocity
    store_block(residual_address, residual, piece, ALIGNED, BLOCK)
    pick(residual, piece, block, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr, BLOCK)
