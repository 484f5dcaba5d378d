"""One step of LAMB: both moments and the weights, in one dense pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.adam import Adam, moment, moved
from lightning_sparse.kernels.addresses import load_block, locate, store_block, store_rounded
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import device_table, is_aligned, piece_tables
from lightning_sparse.kernels.weights import batches, check_moments, check_scale, take

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096


@torch.no_grad()
def lamb_step_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    scale: Tensor,
    adam: Adam,
    fused: bool = True,
) -> None:
    """Moves the moments on and the weights by ``-scale * update``, in place, with the update of `lamb_norms`.

    Each product, sum and quotient is rounded to fp32, one by one, alike on every path; a root may differ in its last
    bit. Half-precision weights are rounded once, at the end.

    Args:
        weights: [numel of piece] fp32, bf16 or fp16 each. Modified in place.
        gradients: Of the same sizes and dtypes.
        firsts, seconds: The moments, [numel of piece] fp32 each. Modified in place.
        scale: [pieces] fp32: learning rate times trust ratio.
        fused: Take the kernel where there is one; False takes foreach operations on every device.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size or device does not fit.
    """
    check_moments(weights, gradients, firsts, seconds)
    check_scale("scale", scale, weights)
    if not any(x.numel() for x in weights):
        return
    if not (fused and use_triton(scale)):
        lamb_step_torch_(weights, gradients, firsts, seconds, scale, adam)
        return
    first_block, tables = piece_tables(weights, firsts, BLOCK)
    rows = [[x.data_ptr(), y.data_ptr()] for x, y in zip(gradients, seconds, strict=True)]
    aligned = is_aligned([*weights, *gradients, *firsts, *seconds])
    with torch.cuda.device_of(scale):
        _lamb_step_kernel[(first_block[-1],)](
            *tables, device_table(rows, scale.device), scale.contiguous(), *adam.numbers(),
            ALIGNED=aligned, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def lamb_step_torch_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    scale: Tensor,
    adam: Adam,
) -> None:
    """`lamb_step_` with foreach operations, batch by batch."""
    scales = scale.unbind()
    for batch in batches(weights):
        w, m, v = take(weights, batch), take(firsts, batch), take(seconds, batch)
        wide = [x.float() for x in w]
        update, new_m, new_v = moved(wide, take(gradients, batch), m, v, adam)
        torch._foreach_copy_(m, new_m)
        torch._foreach_copy_(v, new_v)
        torch._foreach_mul_(update, [scales[piece] for piece, _, _ in batch])
        torch._foreach_sub_(wide, update)
        for x, y in zip(w, wide, strict=True):
            if x is not y:
                x.copy_(y)


@jit
def _lamb_step_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, others_ptr, scale_ptr,
    beta1, share1, beta2, share2, first_scale, second_scale, eps, decay, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    piece, address, kind, first_address = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    index = tl.load(piece_of_block_ptr + block)
    second_address = tl.load(others_ptr + 2 * index + 1)
    gradient = load_block(tl.load(others_ptr + 2 * index), kind, piece, ALIGNED, BLOCK)
    # one vector after the other: all four at once would take more than 128 registers a thread
    v = moment(load_block(second_address, 0, piece, ALIGNED, BLOCK), gradient * gradient, beta2, share2)
    store_block(second_address, v, piece, ALIGNED, BLOCK)
    below = tl.sqrt_rn(second_scale * v) + eps
    m = moment(load_block(first_address, 0, piece, ALIGNED, BLOCK), gradient, beta1, share1)
    store_block(first_address, m, piece, ALIGNED, BLOCK)
    update = tl.div_rn(first_scale * m, below)
    weight = load_block(address, kind, piece, ALIGNED, BLOCK)
    weight -= tl.load(scale_ptr + index) * (update + decay * weight)
    store_rounded(address, kind, weight, piece, ALIGNED, BLOCK)
