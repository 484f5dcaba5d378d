"""Adds a gradient to its residual and picks the large entries of the sum, in one dense pass."""

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
def accumulate_select(
    gradients: Sequence[Tensor], residuals: Sequence[Tensor], threshold: Tensor, capacity: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds gradients to residuals in place and picks the entries with |residual| >= threshold, zero and NaN never.

    Picked entries stay in the residual. If more than `capacity` qualify, they are taken in the order of their indices
    from `start` on, wrapping at the end of the vector.

    Args:
        gradients: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each; cast to fp32 before the addition.
        residuals: Pieces of the same sizes, [numel of piece] fp32. Modified in place.
        threshold: [] fp32 on the same device; the host never reads it unless the tensors are on the CPU.
        start: In [0, numel of the vector).

    Returns:
        values [capacity] fp32 and indices [capacity] into the concatenated pieces (int32, or int64 from 2**31 entries
        on), ascending, then padding (value 0, index 0); and count [] int64, how many qualified, perhaps more than
        capacity.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size, device, `capacity` or `start` does not fit.
    """
    check_selection("gradients", gradients, threshold, capacity, start)
    check_pairs("gradients", gradients, "residuals", residuals)
    if use_triton(threshold):
        return compact(_accumulate_select_kernel, gradients, residuals, "y", threshold, capacity, start)
    return accumulate_select_torch(gradients, residuals, threshold, capacity, start)


def accumulate_select_torch(
    gradients: Sequence[Tensor], residuals: Sequence[Tensor], threshold: Tensor, capacity: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`accumulate_select` on the CPU, block by block."""

    def fill(piece: int, begin: int, end: int, out: Tensor) -> Tensor:
        return residuals[piece][begin:end].add_(gradients[piece][begin:end])

    bounds = bounds_of(gradients)
    return compact_blocks(fill, bounds, threshold, capacity, start, index_dtype(bounds[-1]))


@jit
def _accumulate_select_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    piece, gradient_address, kind, residual_address = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    residual = load_block(residual_address, 0, piece, ALIGNED, BLOCK)
    residual += load_block(gradient_address, kind, piece, ALIGNED, BLOCK)
    store_block(residual_address, residual, piece, ALIGNED, BLOCK)
    pick(residual, piece, block, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr, BLOCK)
