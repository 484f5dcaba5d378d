"""The Triton half that the select ops share: rank the picked entries of each block, then collect them in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import gather, upper_bound
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.pieces import bounds_of, device_table, index_dtype, is_aligned, piece_tables

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096
OUTPUT_BLOCK = 256


def compact(
    kernel: Any,
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    source: str,
    threshold: Tensor,
    capacity: int,
    start: int,
    z: Sequence[Tensor] = (),
    numbers: Sequence[float] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches a dense `kernel` over the blocks of x and y, then collects what it picked; no host sync.

    `source` is what the values are read from: "x", "y", or "x-y". A third list, z, goes to the kernel as a table of its
    addresses, before `numbers`. Scratch: 2 bytes an entry, of which only the picked ones are touched.
    """
    device, bounds = threshold.device, bounds_of(x)
    values = torch.empty(capacity, dtype=torch.float32, device=device)  # [capacity]
    indices = torch.empty(capacity, dtype=index_dtype(bounds[-1]), device=device)  # [capacity]
    if bounds[-1] == 0:
        return values.zero_(), indices.zero_(), torch.zeros((), dtype=torch.int64, device=device)

    first_block, tables = piece_tables(x, y, BLOCK)
    blocks = first_block[-1]
    offsets = torch.empty(blocks * BLOCK, dtype=torch.int16, device=device)  # [blocks * BLOCK]
    counts = torch.empty(blocks, dtype=torch.int32, device=device)  # [blocks]
    before = torch.empty(1, dtype=torch.int64, device=device)  # [1]
    aligned = is_aligned([*x, *y, *z])
    more = (device_table([[piece.data_ptr() for piece in z]], device), *numbers) if z else ()
    # A thread's current device may be another one, and launches go there.
    with torch.cuda.device_of(threshold):
        kernel[(blocks,)](
            *tables, threshold, start, offsets, counts, before, *more,
            ALIGNED=aligned, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        ends = torch.cumsum(counts, 0, dtype=torch.int64)  # [blocks]
        start_piece = bisect_right(bounds, start) - 1
        start_block = first_block[start_piece] + (start - bounds[start_piece]) // BLOCK
        first = ends[start_block] - counts[start_block] + before  # [1]
        if capacity > 0:
            _collect_kernel[(-(-capacity // OUTPUT_BLOCK),)](
                *tables, offsets, ends, first, blocks, values, indices, capacity,
                SOURCE=source, STEPS=blocks.bit_length(), BLOCK=BLOCK, OUTPUT_BLOCK=OUTPUT_BLOCK,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return values, indices, ends[-1]


@jit
def pick(x, piece, block, threshold_ptr, start, offsets_ptr, counts_ptr, before_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the offsets of a block's picked entries side by side, their number, and how many lie before `start`."""
    begin, length, shift = piece
    offset = tl.arange(0, BLOCK)  # [BLOCK] int32
    picked = (tl.abs(x) >= tl.load(threshold_ptr)) & (x != 0) & (shift + offset < length)
    ranks = tl.cumsum(picked.to(tl.int32), 0)
    tl.store(offsets_ptr + block * BLOCK + ranks - 1, offset.to(tl.int16), mask=picked)
    tl.store(counts_ptr + block, tl.sum(picked.to(tl.int32), 0))
    left = start - begin - shift
    if (left >= 0) & (left < tl.minimum(length - shift, BLOCK)):
        tl.store(before_ptr, tl.sum((picked & (offset < left)).to(tl.int32), 0).to(tl.int64))


@jit
def _collect_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, offsets_ptr, ends_ptr, first_ptr, blocks, values_ptr, indices_ptr, capacity,
    SOURCE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, OUTPUT_BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    count = tl.load(ends_ptr + blocks - 1)
    first = tl.load(first_ptr)
    # Ranks first, first + 1, ... have the first claim; the capacity they leave goes to ranks 0, 1, ...
    wrapped = tl.maximum(tl.minimum(first, capacity - (count - first)), 0)
    rank = tl.where(slot < wrapped, slot, slot - wrapped + first)
    used = (slot < capacity) & (rank < count)
    block = upper_bound(ends_ptr, blocks, rank, used, STEPS)
    rank -= tl.load(ends_ptr + block - 1, mask=used & (block > 0), other=0)
    local = tl.load(offsets_ptr + block * BLOCK + rank, mask=used, other=0)

    row = pieces_ptr + 6 * tl.load(piece_of_block_ptr + block, mask=used, other=0)
    local += (block - tl.load(row + 2, mask=used, other=0)) * BLOCK
    x = tl.zeros((OUTPUT_BLOCK,), tl.float32)
    if SOURCE != "y":
        x += gather(tl.load(row + 3, mask=used, other=0), tl.load(row + 4, mask=used, other=0), local, used)
    if SOURCE != "x":
        y = tl.load(tl.load(row + 5, mask=used, other=0).to(tl.pointer_type(tl.float32)) + local, mask=used, other=0)
        x = y if SOURCE == "y" else x - y
    tl.store(values_ptr + slot, x, mask=slot < capacity)
    index = tl.load(row, mask=used, other=0) + tl.where(used, local, 0)
    tl.store(indices_ptr + slot, index.to(indices_ptr.dtype.element_ty), mask=slot < capacity)
