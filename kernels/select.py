"""Picks the large entries of a vector, in one dense pass that only reads."""

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
from lightning_sparse.kernels.pieces import bounds_of, check_selection, index_dtype

if TYPE_CHECKING:
    import triton.language as tl


@torch.no_grad()
def select(
    vectors: Sequence[Tensor], threshold: Tensor, capacity: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks the entries x with |x| >= threshold, zero and NaN never; writes none of them.

    Args:
        vectors: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each; cast to fp32 first.
        threshold: [] fp32 on the same device.
        start: Where the order of taking begins when more than `capacity` qualify, as in `accumulate_select`.

    Returns:
        values [capacity] fp32, indices [capacity], count [] int64, as `accumulate_select` does.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A device, `capacity` or `start` does not fit.
    """
    check_selection("vectors", vectors, threshold, capacity, start)
    if use_triton(threshold):
        return compact(_select_kernel, vectors, vectors, "x", threshold, capacity, start)
    return select_torch(vectors, threshold, capacity, start)


def select_torch(
    vectors: Sequence[Tensor], threshold: Tensor, capacity: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`select` on the CPU, block by block."""

    def fill(piece: int, begin: int, end: int, out: Tensor) -> Tensor:
        entries = vectors[piece][begin:end]
        return entries if entries.dtype == torch.float32 else out.copy_(entries)

    bounds = bounds_of(vectors)
    return compact_blocks(fill, bounds, threshold, capacity, start, index_dtype(bounds[-1]))


@jit
def _select_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    piece, address, kind, _ = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    x = load_block(address, kind, piece, ALIGNED, BLOCK)
    pick(x, piece, block, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr, BLOCK)
