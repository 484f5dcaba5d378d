"""Adds a payload's values to the entries of a vector that its indices name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import gather, to_bfloat16, upper_bound
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import KINDS, bounds_of, check_payload, check_pieces, device_table, touched, within

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 512
LARGEST = torch.finfo(torch.float32).max


@torch.no_grad()
def scatter_add_(targets: Sequence[Tensor], values: Tensor, indices: Tensor, alpha: float = 1.0) -> None:
    """Computes concat(targets)[indices] += alpha * values in place, skipping products that are zero.

    One rounded fp32 product, one rounded fp32 sum, one rounding to the target's dtype: the same bits on every path. No
    atomics: call it for one payload after another, in the same order on every rank, and the sums are equal.

    Args:
        targets: The vector's pieces, [numel of piece] fp32, bf16 or fp16 each. Modified in place.
        values: [k] fp32; entries other than 0 have unique indices, ascending.
        indices: [k] int32 or int64; those outside the vector are skipped.
        alpha: Finite in fp32.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size or device does not fit, or alpha is not finite in fp32.
    """
    check_pieces("targets", targets, values.device, list(KINDS))
    check_payload(values, indices)
    if not abs(alpha) <= LARGEST:
        raise ValueError(f"alpha must be finite in fp32, got {alpha}: it would turn padding into NaN")
    # Scaled apart from the sum, so that no compiler fuses the two into one rounding.
    products = values if alpha == 1.0 else values * alpha  # [k]
    if not use_triton(values):
        return scatter_add_torch_(targets, products, indices)

    bounds, entries, device = bounds_of(targets), values.numel(), values.device
    if bounds[-1] == 0 or entries == 0:
        return None
    tables = device_table([bounds], device), device_table([(x.data_ptr(), KINDS[x.dtype]) for x in targets], device)
    with torch.cuda.device_of(values):
        _scatter_add_kernel[(-(-entries // BLOCK),)](
            *tables, len(targets), products, indices, entries,
            STEPS=len(bounds).bit_length(), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return None


def scatter_add_torch_(targets: Sequence[Tensor], products: Tensor, indices: Tensor) -> None:
    """`scatter_add_` on the CPU: one indexed addition for each piece that is touched."""
    live = (products != 0) & within(indices, bounds_of(targets)[-1])  # [k]
    if not live.all():
        products, indices = products[live], indices[live]
    for target, positions, at in touched(targets, indices):
        if target.dtype == torch.float32:
            target.index_add_(0, at, products[positions])
        else:
            at = at.long()
            target[at] = (target[at].float() + products[positions]).to(target.dtype)


@jit
def _scatter_add_kernel(  # type: ignore[no-untyped-def]
    bounds_ptr, targets_ptr, pieces, products_ptr, indices_ptr, entries, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(products_ptr + entry, mask=entry < entries, other=0)
    index = tl.load(indices_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    live = (product != 0) & (index >= 0) & (index < tl.load(bounds_ptr + pieces))
    piece = upper_bound(bounds_ptr, pieces + 1, index, live, STEPS) - 1
    address = tl.load(targets_ptr + 2 * piece, mask=live, other=0)
    kind = tl.load(targets_ptr + 2 * piece + 1, mask=live, other=0)
    offset = index - tl.load(bounds_ptr + piece, mask=live, other=0)
    total = gather(address, kind, offset, live) + product
    tl.store(address.to(tl.pointer_type(tl.float32)) + offset, total, mask=live & (kind == 0))
    tl.store(address.to(tl.pointer_type(tl.uint16)) + offset, to_bfloat16(total), mask=live & (kind == 1))
    tl.store(address.to(tl.pointer_type(tl.float16)) + offset, total.to(tl.float16), mask=live & (kind == 2))
