"""Norms of each piece's weights and of the update that LAMB is about to make, in one dense pass that only reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.adam import Adam, moment, moved
from lightning_sparse.kernels.addresses import load_block, locate
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.norms import join, squares_torch
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import device_table, is_aligned, piece_tables
from lightning_sparse.kernels.weights import batches, check_moments, take

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096


@torch.no_grad()
def lamb_norms(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    adam: Adam,
    fused: bool = True,
) -> Tensor:
    """Norms of w and of the update, with the moments as they will be: ``m = beta1 * m + (1 - beta1) * g`` and so on.

    Summed as in `norms`: those of a piece do not depend on which other pieces there are.

    Args:
        weights: [numel of piece] fp32, bf16 or fp16 each.
        gradients: Of the same sizes and dtypes.
        firsts, seconds: The moments so far, [numel of piece] fp32 each.
        fused: Take the kernel where there is one; False takes foreach operations on every device.

    Returns:
        [2, pieces] fp32.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size or device does not fit.
    """
    device = check_moments(weights, gradients, firsts, seconds)
    if not any(x.numel() for x in weights):
        return torch.zeros(2, len(weights), device=device)
    if not (fused and use_triton(weights[0])):
        return lamb_norms_torch(weights, gradients, firsts, seconds, adam)
    first_block, tables = piece_tables(weights, firsts, BLOCK)
    others = device_table([[x.data_ptr(), y.data_ptr()] for x, y in zip(gradients, seconds, strict=True)], device)
    parts = torch.empty(2, first_block[-1], dtype=torch.float32, device=device)  # [2, blocks]
    aligned = is_aligned([*weights, *gradients, *firsts, *seconds])
    with torch.cuda.device_of(weights[0]):
        _lamb_norms_kernel[(first_block[-1],)](
            *tables, others, parts, first_block[-1], *adam.numbers(),
            ALIGNED=aligned, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return join(parts, first_block)


def lamb_norms_torch(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    adam: Adam,
) -> Tensor:
    """`lamb_norms` with foreach operations, batch by batch."""
    owners: list[int] = []
    squares = []
    for batch in batches(weights):
        wide = [x.float() for x in take(weights, batch)]
        update, _, _ = moved(wide, take(gradients, batch), take(firsts, batch), take(seconds, batch), adam)
        squares.append(squares_torch([*wide, *update]).view(2, -1))  # [2, cuts]
        owners += [piece for piece, _, _ in batch]
    at = torch.tensor(owners, device=weights[0].device)
    sums = torch.zeros(2, len(weights), dtype=torch.float64, device=at.device)
    # on a GPU every piece is one cut, so no two of them meet and the order is the same each time
    return sums.index_add_(1, at, torch.cat(squares, 1)).sqrt().float()


@jit
def _lamb_norms_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, others_ptr, parts_ptr, blocks,
    beta1, share1, beta2, share2, first_scale, second_scale, eps, decay, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    piece, address, kind, first_address = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    row = others_ptr + 2 * tl.load(piece_of_block_ptr + block)
    weight = load_block(address, kind, piece, ALIGNED, BLOCK)
    gradient = load_block(tl.load(row), kind, piece, ALIGNED, BLOCK)
    v = moment(load_block(tl.load(row + 1), 0, piece, ALIGNED, BLOCK), gradient * gradient, beta2, share2)
    m = moment(load_block(first_address, 0, piece, ALIGNED, BLOCK), gradient, beta1, share1)
    update = tl.div_rn(first_scale * m, tl.sqrt_rn(second_scale * v) + eps)
    update += decay * weight
    # beyond the piece's end everything was loaded as zero, and 0 / (0 + eps) is zero only where eps is not
    update = tl.where(piece[2] + tl.arange(0, BLOCK) < piece[1], update, 0)
    tl.store(parts_ptr + block, tl.sum(weight * weight, 0))
    tl.store(parts_ptr + blocks + block, tl.sum(update * update, 0))
