"""The k-th largest magnitude of a vector, exactly: radix select on the bits of its floats, no sort."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import load_block, locate
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import bounds_of, check_vectors, is_aligned, piece_tables

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096
# Enough to fill every multiprocessor; each adds its own histogram to the common one once.
PROGRAMS = 1024
# The 31 bits of a magnitude are read in digits of 11, 11 and 9 bits.
CUTS = (31, 20, 9, 0)
# As fp32, the digits of bf16 and fp16 end at bits 16 and 13: all below is zero.
PASSES = {torch.float32: 3, torch.bfloat16: 2, torch.float16: 2}


@torch.no_grad()
def kth_largest(vectors: Sequence[Tensor], k: int) -> Tensor:
    """The k-th largest |x|, or 0 if fewer than k entries are neither zero nor NaN.

    As a threshold it makes `select` pick at least k entries, or all that it ever picks; the next float above picks
    fewer than k.

    Args:
        vectors: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each; cast to fp32 first.
        k: At least 1.

    Returns:
        [] fp32 on the pieces' device; the host reads nothing unless they are on the CPU.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A device, or `k`, does not fit.
    """
    device, bounds = check_vectors(vectors), bounds_of(vectors)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if bounds[-1] == 0:
        return torch.zeros((), device=device)
    if not use_triton(vectors[0]):
        return kth_largest_torch(vectors, k)

    first_block, tables = piece_tables(vectors, vectors, BLOCK)
    blocks, aligned = first_block[-1], is_aligned(vectors)
    programs, passes = min(blocks, PROGRAMS), max(PASSES[x.dtype] for x in vectors)
    counts = torch.zeros(passes, 1 << 11, dtype=torch.int64, device=device)  # [passes, bins]
    # The digits chosen so far, and which of the entries that begin with them is meant.
    key = torch.zeros(1, dtype=torch.int32, device=device)
    rank = torch.full((1,), k, dtype=torch.int64, device=device)
    with torch.cuda.device_of(vectors[0]):
        for count, (top, bottom) in zip(counts, pairwise(CUTS), strict=False):
            _count_kernel[(programs,)](
                *tables, key, count, blocks, programs, TOP=top, BOTTOM=bottom,
                ALIGNED=aligned, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            _choose_kernel[(1,)](count, key, rank, TOP=top, BOTTOM=bottom, num_warps=8, enable_fp_fusion=False)
    return key.view(torch.float32)[0]


def kth_largest_torch(vectors: Sequence[Tensor], k: int) -> Tensor:
    """`kth_largest` on the CPU: three histograms, block by block."""
    size = min(1 << 18, max(x.numel() for x in vectors))
    scratch = torch.empty(size)  # [size]
    key = 0
    for shift, bins in ((20, 1 << 11), (9, 1 << 11), (0, 1 << 9)):
        # Bin 0 is for what is smaller than all that begins with the digits chosen so far, the last for what is larger.
        counts = torch.zeros(bins + 2, dtype=torch.int64)
        for x in (block for vector in vectors for block in vector.split(size)):
            magnitude = scratch[: x.numel()].copy_(x).abs_().nan_to_num_(nan=0.0, posinf=torch.inf)
            digits = magnitude.view(torch.int32).sub_(key - (1 << shift)).bitwise_right_shift_(shift)
            counts += torch.bincount(digits.clamp_(0, bins + 1), minlength=bins + 2)
        at_least = counts[1:].flip(0).cumsum(0).flip(0)  # [bins + 1]
        key += max(int((at_least >= k).sum()) - 1, 0) << shift
    return torch.tensor(key, dtype=torch.int32).view(torch.float32)


@jit
def _count_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, key_ptr, counts_ptr, blocks, programs,
    TOP: tl.constexpr, BOTTOM: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    BINS: tl.constexpr = 1 << (TOP - BOTTOM)
    prefix = tl.load(key_ptr) >> TOP
    counts = tl.zeros((BINS,), tl.int32)
    for block in range(tl.program_id(0).to(tl.int64), blocks, programs):
        piece, address, kind, _ = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
        magnitude = tl.abs(load_block(address, kind, piece, ALIGNED, BLOCK))
        bits = magnitude.to(tl.int32, bitcast=True)
        counted = (magnitude > 0) & ((bits >> TOP) == prefix)
        counts += tl.histogram((bits >> BOTTOM) & (BINS - 1), BINS, mask=counted)
    tl.atomic_add(counts_ptr + tl.arange(0, BINS), counts.to(tl.int64), mask=counts != 0)


@jit
def _choose_kernel(counts_ptr, key_ptr, rank_ptr, TOP: tl.constexpr, BOTTOM: tl.constexpr):  # type: ignore[no-untyped-def]
    digits = tl.arange(0, 1 << (TOP - BOTTOM))
    counts = tl.load(counts_ptr + digits)
    key, rank = tl.load(key_ptr), tl.load(rank_ptr)
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.max(tl.where(at_least >= rank, digits, 0), 0)
    tl.store(key_ptr, key | (digit << BOTTOM))
    tl.store(rank_ptr, rank - tl.sum(tl.where(digits > digit, counts, 0), 0))
