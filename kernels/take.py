"""Reads the entries of a vector that a payload has sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import gather, upper_bound
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import KINDS, bounds_of, check_payload, check_pieces, device_table, touched, within

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 512


@torch.no_grad()
def take(vectors: Sequence[Tensor], values: Tensor, indices: Tensor) -> Tensor:
    """concat(vectors)[indices] where a payload's values are not zero, and zero for its padding: [k] fp32.

    Args:
        vectors: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each.
        values: [k] fp32; entries other than 0 have unique indices, ascending.
        indices: [k] int32 or int64; those outside the vector give zero.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size or device does not fit.
    """
    check_pieces("vectors", vectors, values.device, list(KINDS))
    check_payload(values, indices)
    if not use_triton(values):
        return take_torch(vectors, values, indices)

    out, bounds, device = torch.zeros_like(values), bounds_of(vectors), values.device
    if bounds[-1] == 0 or values.numel() == 0:
        return out
    tables = device_table([bounds], device), device_table([(x.data_ptr(), KINDS[x.dtype]) for x in vectors], device)
    with torch.cuda.device_of(values):
        _take_kernel[(-(-values.numel() // BLOCK),)](
            *tables, len(vectors), values, indices, out, values.numel(),
            STEPS=len(bounds).bit_length(), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def take_torch(vectors: Sequence[Tensor], values: Tensor, indices: Tensor) -> Tensor:
    """`take` on the CPU: one indexed read for each piece that is touched."""
    live = (values != 0) & within(indices, bounds_of(vectors)[-1])  # [k]
    is_whole = bool(live.all())
    if not is_whole:
        indices = indices[live]
    found = torch.empty(indices.numel(), dtype=torch.float32, device=values.device)
    for vector, positions, at in touched(vectors, indices):
        found[positions] = vector[at].float()
    return found if is_whole else torch.zeros_like(values).masked_scatter_(live, found)


@jit
def _take_kernel(  # type: ignore[no-untyped-def]
    bounds_ptr, vectors_ptr, pieces, values_ptr, indices_ptr, out_ptr, entries, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values_ptr + entry, mask=entry < entries, other=0)
    index = tl.load(indices_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    live = (value != 0) & (index >= 0) & (index < tl.load(bounds_ptr + pieces))
    piece = upper_bound(bounds_ptr, pieces + 1, index, live, STEPS) - 1
    address = tl.load(vectors_ptr + 2 * piece, mask=live, other=0)
    kind = tl.load(vectors_ptr + 2 * piece + 1, mask=live, other=0)
    offset = index - tl.load(bounds_ptr + piece, mask=live, other=0)
    tl.store(out_ptr + entry, gather(address, kind, offset, live), mask=live)
