"""Picks the large entries of weights minus anchors, in one dense pass that only reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import load_block, locate
from lightning_sparse.kernels.compact import compact, pick
from lightning_sparse.kernels.compact_blocks import compact_blocks
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import bounds_of, check_pairs, check_selection, index_dtype

if TYPE_CHECKING:
    import triton.language as tl


@torch.no_grad()
def difference_select(
    weights: Sequence[Tensor], anchors: Sequence[Tensor], threshold: Tensor, capacity: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks the entries u = weight - anchor with |u| >= threshold, zero and NaN never; writes neither list.

    Args:
        weights: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each; cast to fp32 before the subtraction.
        anchors: Pieces of the same sizes, [numel of piece] fp32.
        threshold: [] fp32 on the same device.
        start: Where the order of taking begins when more than `capacity` qualify, as in `accumulate_select`.

    Returns:
        values [capacity] fp32, indices [capacity], count [] int64, as `accumulate_select` does.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size, device, `capacity` or `start` does not fit.
    """
    check_selection("weights", weights, threshold, capacity, start)
    check_pairs("weights", weights, "anchors", anchors)
    if use_triton(threshold):
        return compact(_difference_select_kernel, weights, anchors, "x-y", threshold, capacity, start)
    return difference_select_torch(weights, anchors, threshold, capacity, start)


def difference_select_torch(
    weights: Sequence[Tensor], anchors: Sequence[Tensor], threshold: Tensor, capacity: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`difference_select` on the CPU, block by block."""

    def fill(piece: int, begin: int, end: int, out: Tensor) -> Tensor:
        return torch.sub(weights[piece][begin:end], anchors[piece][begin:end], out=out)

    bounds = bounds_of(weights)
    return compact_blocks(fill, bounds, threshold, capacity, start, index_dtype(bounds[-1]))


@jit
def _difference_select_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    piece, weight_address, kind, anchor_address = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    anchor = load_block(anchor_address, 0, piece, ALIGNED, BLOCK)
    difference = load_block(weight_address, kind, piece, ALIGNED, BLOCK) - anchor
    pick(difference, piece, block, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr, BLOCK)
