"""Products of a matrix of which only some tiles are not zero, with a dense one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_matmul import block_matmul
from lightning_sparse.kernels.block_tiles import takes_kernel


def tile_matmul(a: Tensor, layout: BlockLayout, b: Tensor, transposed: bool = False) -> Tensor:
    """Computes a @ b, or a.t() @ b if ``transposed``, from the tiles of a that the layout names; others count as 0.

    On a GPU by `block_matmul` over a copy of the tiles; on the CPU by one GEMM for each run of neighbouring tiles,
    where they lie.

    Args:
        a: [m, k], of which the layout has m as outputs and k as inputs.
        b: [k, n], or [m, n] if ``transposed``; any strides.

    Returns:
        [m, n], or [k, n] if ``transposed``.
    """
    if takes_kernel(a):
        return block_matmul(b.t(), _blocks(a, layout), layout, transposed=transposed).t()
    return tile_matmul_torch(a, layout, b, transposed)


def tile_matmul_torch(a: Tensor, layout: BlockLayout, b: Tensor, transposed: bool = False) -> Tensor:
    """`tile_matmul` on the CPU."""
    mask = layout.mask
    if transposed:
        a, mask = a.t(), mask.t()
    out = b.new_empty(a.shape[0], b.shape[1])
    for rows, sums, runs in zip(a.split(layout.block), out.split(layout.block), map(_runs, mask.tolist()), strict=True):
        if not runs:
            sums.zero_()
        for i, (first, last) in enumerate(runs):
            inner = slice(first * layout.block, last * layout.block)
            if i == 0:
                torch.mm(rows[:, inner], b[inner], out=sums)
            else:
                sums.addmm_(rows[:, inner], b[inner])
    return out


def _runs(live: list[bool]) -> list[tuple[int, int]]:
    """First and behind-last places of runs of True."""
    edges = [i for i, (before, now) in enumerate(zip([False, *live], [*live, False], strict=True)) if before != now]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _blocks(a: Tensor, layout: BlockLayout) -> Tensor:
    """The live tiles, [n, tile, tile], each transposed, as block ops want them."""
    tile, (rows, columns) = layout.block, layout.grid
    if not layout.even:
        a = F.pad(a, (0, columns * tile - a.shape[1], 0, rows * tile - a.shape[0]))
    tiles = a.reshape(rows, tile, columns, tile).permute(0, 2, 3, 1)
    return tiles[layout.rows.to(a.device), layout.cols.to(a.device)].contiguous()
