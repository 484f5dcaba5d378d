"""Keeps the n largest magnitudes of every m consecutive weights of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton

if TYPE_CHECKING:
    import triton.language as tl

GROUPS = (2, 4, 8, 16)
# weights that the CPU compares at a time, and pairs of weights that one program compares
AT_ONCE, PAIRS = 65_536, 2048


@torch.no_grad()
def nm_prune(weight: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The weight with all but the n largest magnitudes of each group of m set to zero, and the mask of what is kept.

    Of equal magnitudes the first are kept. A last group of fewer than m weights keeps n too, or all it has.

    Args:
        weight: [rows, columns] float32, bfloat16, float16 or float64; groups run along the columns.
        n: kept of each group, in [1, m].
        m: size of a group: 2, 4, 8 or 16.

    Returns:
        pruned [rows, columns] of the same dtype, mask [rows, columns] bool.

    Raises:
        ValueError: n, m or the number of dimensions does not fit.

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch",
    https://arxiv.org/abs/2102.04010, section 3.
    """
    check_nm("nm_prune", n, m)
    if weight.dim() != 2:
        raise ValueError(f"nm_prune: weight must have two dimensions, got {list(weight.shape)}")
    if not use_triton(weight) or weight.dtype == torch.float64:
        return nm_prune_torch(weight, n, m)
    weight = weight.contiguous()
    pruned, mask = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.bool)
    rows, columns = weight.shape
    groups = -(-columns // m)
    if weight.numel():
        with torch.cuda.device_of(weight):
            _nm_prune_kernel[(-(-rows * groups // tile(m)),)](
                weight, pruned, mask, rows, columns, groups, N=n, M=m, TILE=tile(m),
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return pruned, mask


def nm_prune_torch(weight: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """`nm_prune` by comparing each pair of a group's weights, some rows at a time."""
    pruned, mask = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.bool)
    zero = weight.new_zeros(())
    rows = max(1, AT_ONCE // max(1, weight.shape[1]))
    for part, out, kept in zip(weight.split(rows), pruned.split(rows), mask.split(rows), strict=True):
        kept.copy_(_kept(part, n, m))
        torch.where(kept, part, zero, out=out)
    return pruned, mask


def _kept(weight: Tensor, n: int, m: int) -> Tensor:
    rows, columns = weight.shape
    magnitudes = weight.abs()
    if columns % m:
        # less than any magnitude
        magnitudes = F.pad(magnitudes, (0, -columns % m), value=-1.0)
    groups = magnitudes.numel() // m
    places = magnitudes.reshape(groups, m).t().contiguous()  # [m, groups]
    # pairs lost to earlier places, less pairs won of later ones
    losses = torch.zeros(m, groups, dtype=torch.int8, device=weight.device)
    for later in range(m):
        for earlier in range(later):
            lost = (places[earlier] >= places[later]).view(torch.int8)
            losses[later] += lost
            losses[earlier] -= lost
    kept = torch.empty(groups, m, dtype=torch.bool, device=weight.device)
    for place in range(m):
        # of the m - 1 - place pairs with later ones, those not won are lost
        torch.lt(losses[place], n - (m - 1 - place), out=kept[:, place])
    return kept.view(rows, columns + -columns % m)[:, :columns]


def tile(m: int) -> int:
    """Groups that one program compares."""
    return PAIRS // (m * m)


def check_nm(owner: str, n: int, m: int) -> None:
    """Raise ValueError unless n of m is a pattern that there is."""
    if m not in GROUPS:
        raise ValueError(f"{owner}: m must be one of {GROUPS}, got {m}")
    if not 1 <= n <= m:
        raise ValueError(f"{owner}: n must be in [1, {m}], got {n}")


@jit
def _nm_prune_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, pruned_ptr, mask_ptr, rows, columns, groups, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # [TILE]
    row, first = group // groups, group % groups * M
    place = tl.arange(0, M)  # [M]
    column = first[:, None] + place[None, :]  # [TILE, M]
    inside = (row[:, None] < rows) & (column < columns)
    at = row[:, None] * columns + column
    weight = tl.load(weight_ptr + at, mask=inside, other=0)
    magnitude = tl.where(inside, tl.abs(weight.to(tl.float32)), -1.0)
    mine, others = magnitude[:, :, None], magnitude[:, None, :]
    earlier = place[None, None, :] < place[None, :, None]
    later = place[None, None, :] > place[None, :, None]
    lost = (earlier & (others >= mine)) | (later & ~(mine >= others))  # [TILE, M, M]
    kept = tl.sum(lost.to(tl.int32), 2) < N  # [TILE, M]
    tl.store(pruned_ptr + at, tl.where(kept, weight, 0.0), mask=inside)
    tl.store(mask_ptr + at, kept, mask=inside)
