"""One step of SGD with momentum in which each piece has a trust ratio of its own, in one dense pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import load_block, locate, store_block, store_rounded
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import check_pairs, device_table, is_aligned, piece_tables
from lightning_sparse.kernels.weights import batches, check_update, take

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096


@torch.no_grad()
def lars_step_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    trust: Tensor,
    lr: float,
    decay: float,
    momentum: float,
    nesterov: bool,
    fused: bool = True,
) -> None:
    """Computes ``u = trust * (g + decay * w)``, ``v = momentum * v + u``, ``w = w - lr * v``, in place.

    With `nesterov` the last is ``w = w - lr * (u + momentum * v)``. Each product and sum is rounded to fp32, one by
    one: the same bits on every path. Half-precision weights are rounded once, at the end.

    Args:
        weights: [numel of piece] fp32, bf16 or fp16 each. Modified in place.
        gradients: Of the same sizes and dtypes.
        velocities: [numel of piece] fp32. Modified in place.
        trust: [pieces] fp32.
        fused: Take the kernel where there is one; False takes foreach operations on every device.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size or device does not fit.
    """
    check_update(weights, gradients, trust)
    check_pairs("weights", weights, "velocities", velocities)
    if not any(x.numel() for x in weights):
        return
    if not (fused and use_triton(trust)):
        lars_step_torch_(weights, gradients, velocities, trust, lr, decay, momentum, nesterov)
        return
    first_block, tables = piece_tables(weights, velocities, BLOCK)
    addresses = device_table([[x.data_ptr() for x in gradients]], trust.device)
    aligned = is_aligned([*weights, *gradients, *velocities])
    numbers = float(lr), float(decay), float(momentum)
    with torch.cuda.device_of(trust):
        _lars_step_kernel[(first_block[-1],)](
            *tables, addresses, trust.contiguous(), *numbers,
            NESTEROV=nesterov, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def lars_step_torch_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    trust: Tensor,
    lr: float,
    decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """`lars_step_` with foreach operations, batch by batch."""
    ratios = trust.unbind()
    for batch in batches(weights):
        w, v = take(weights, batch), take(velocities, batch)
        wide = [x.float() for x in w]
        # products apart from sums: `add` with a factor would round the two once
        update = torch._foreach_mul(wide, decay)
        torch._foreach_add_(update, [x.float() for x in take(gradients, batch)])
        torch._foreach_mul_(update, [ratios[piece] for piece, _, _ in batch])
        torch._foreach_mul_(v, momentum)
        torch._foreach_add_(v, update)
        if nesterov:
            torch._foreach_add_(update, torch._foreach_mul(v, momentum))
            torch._foreach_mul_(update, lr)
        else:
            update = torch._foreach_mul(v, lr)
        torch._foreach_sub_(wide, update)
        for x, y in zip(w, wide, strict=True):
            if x is not y:
                x.copy_(y)


@jit
def _lars_step_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, gradients_ptr, trust_ptr, lr, decay, momentum,
    NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    piece, address, kind, velocity_address = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    index = tl.load(piece_of_block_ptr + block)
    weight = load_block(address, kind, piece, ALIGNED, BLOCK)
    update = load_block(tl.load(gradients_ptr + index), kind, piece, ALIGNED, BLOCK) + decay * weight
    update = tl.load(trust_ptr + index) * update
    velocity = momentum * load_block(velocity_address, 0, piece, ALIGNED, BLOCK) + update
    store_block(velocity_address, velocity, piece, ALIGNED, BLOCK)
    if NESTEROV:
        step = update + momentum * velocity
    else:
        step = velocity
    store_rounded(address, kind, weight - lr * step, piece, ALIGNED, BLOCK)
