"""Count, mean and variance of the magnitudes in a vector, and the mean of their logarithms, in one dense pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import load_block, locate
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import bounds_of, check_vectors, is_aligned, piece_tables

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096


class Moments(NamedTuple):
    """What `moments` returns, on the device of the vector; NaN where no entry is live."""

    counted: Tensor  # [] int64
    mean: Tensor  # [] float64
    variance: Tensor  # [] float64, over what is counted
    log_mean: Tensor  # [] float64

    def with_zeros(self, numel: int) -> Moments:
        """The moments over all `numel` entries, of which those not counted are zero; logarithms stay of the counted."""
        share = self.counted.double() / max(numel, 1)
        mean = torch.where(self.counted > 0, share * self.mean, 0.0)
        square = torch.where(self.counted > 0, share * (self.variance + self.mean.square()), 0.0)
        return Moments(torch.full_like(self.counted, numel), mean, square - mean.square(), self.log_mean)


@torch.no_grad()
def moments(vectors: Sequence[Tensor]) -> Moments:
    """Moments of |x| over the live entries: neither zero nor NaN. `Moments.with_zeros` gives those over all entries.

    Sums of 4096 entries are in fp32 about the block's own mean, and joined in fp64, in the same order each time. An
    infinite entry makes the mean infinite and the variance NaN; so may blocks of entries above 8e34.

    Args:
        vectors: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each; cast to fp32 first.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size or device does not fit.
    """
    device = check_vectors(vectors)
    if bounds_of(vectors)[-1] == 0:
        nan = torch.full((), torch.nan, dtype=torch.float64, device=device)
        return Moments(torch.zeros((), dtype=torch.int64, device=device), nan, nan, nan)
    if not use_triton(vectors[0]):
        return moments_torch(vectors)
    first_block, tables = piece_tables(vectors, vectors, BLOCK)
    blocks, aligned = first_block[-1], is_aligned(vectors)
    parts = torch.empty(4, blocks, dtype=torch.float32, device=device)  # [4, blocks]
    with torch.cuda.device_of(vectors[0]):
        _moments_kernel[(blocks,)](
            *tables, parts, blocks, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    counts, means, spreads, logs = parts.double().unbind()  # [blocks] each
    count = counts.sum()
    mean = (counts * means).sum() / count
    variance = (means.square() * spreads + counts * (means - mean).square()).sum() / count
    return Moments(count.long(), mean, variance, logs.sum() / count)


def moments_torch(vectors: Sequence[Tensor]) -> Moments:
    """`moments` on the CPU, block by block; what lies between blocks is joined as in Chan et al.'s formula."""
    size = max(1, min(1 << 17, max(x.numel() for x in vectors)))
    scratch, live = torch.empty(size), torch.empty(size, dtype=torch.bool)  # [size] each
    count, whole, spread, logs = 0, 0.0, 0.0, 0.0
    for x in (block for vector in vectors for block in vector.split(size)):
        magnitude, mask = scratch[: x.numel()].copy_(x).abs_(), live[: x.numel()]
        torch.gt(magnitude, 0, out=mask)
        found = int(torch.count_nonzero(mask))
        if found == 0:
            continue
        if found < x.numel():
            magnitude = magnitude[mask]
        here = float(magnitude.sum())
        if here == math.inf:
            # Perhaps no entry is, and only fp32 overflowed.
            here = float(magnitude.sum(dtype=torch.float64))
        here /= found
        # About the mean and in its unit, so that squares neither cancel nor underflow.
        relative = (magnitude / here).sub_(1)
        spread += here**2 * float(torch.dot(relative, relative))
        if count:
            spread += (here - whole / count) ** 2 * count * found / (count + found)
        whole += here * found
        logs += float(magnitude.log_().sum())
        count += found
    sums = (whole / count, spread / count, logs / count) if count else (math.nan,) * 3
    return Moments(torch.tensor(count), *(torch.tensor(x, dtype=torch.float64) for x in sums))


@jit
def _moments_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, parts_ptr, blocks, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    piece, address, kind, _ = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    magnitude = tl.abs(load_block(address, kind, piece, ALIGNED, BLOCK))
    # What lies beyond the piece's end was loaded as zero.
    live = magnitude > 0
    count = tl.sum(live.to(tl.float32), 0)
    mean = tl.sum(tl.where(live, magnitude, 0), 0) / tl.maximum(count, 1)
    relative = tl.where(live, magnitude / mean - 1, 0)
    tl.store(parts_ptr + block, count)
    tl.store(parts_ptr + blocks + block, mean)
    tl.store(parts_ptr + 2 * blocks + block, tl.sum(relative * relative, 0))
    tl.store(parts_ptr + 3 * blocks + block, tl.sum(tl.log(tl.where(live, magnitude, 1)), 0))
