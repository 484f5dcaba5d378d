"""Masks of live blocks: at random, by size, and as users give them; norms of blocks on the grid."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.compressors.sample import entries
from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.random import Draw


def random_mask(grid: tuple[int, int], density: float, seed: int) -> Tensor:
    """[block rows, block columns] bool with density * blocks of them live, at least one, equal on all ranks."""
    scores = Draw(seed, 0, "BlockSparseLinear").bits(grid[0] * grid[1])
    return largest_mask(scores.view(grid), density)


def largest_mask(scores: Tensor, density: float) -> Tensor:
    """[block rows, block columns] bool on the CPU: the density * blocks of largest score; of equal ones the first.

    Raises:
        ValueError: a density outside (0, 1].
    """
    if not 0 < density <= 1:
        raise ValueError(f"BlockSparseLinear: density must be in (0, 1], got {density}: give a mask for none at all")
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    best = scores.view(-1).cpu().sort(descending=True, stable=True).indices
    mask[best[: entries(scores.numel(), density)]] = True
    return mask.view(scores.shape)


def check_mask(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mask, on the CPU.

    Raises:
        TypeError: it is not bool.
        ValueError: it has not the shape of the grid.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"BlockSparseLinear: mask must be torch.bool, got {mask.dtype}")
    if tuple(mask.shape) != grid:
        raise ValueError(f"BlockSparseLinear: mask must be {list(grid)}, one for each block, got {list(mask.shape)}")
    return mask.cpu()


def block_norms(blocks: Tensor, layout: BlockLayout, order: float) -> Tensor:
    """[block rows, block columns] float32: the norm of each stored block, 0 elsewhere."""
    norms = torch.linalg.vector_norm(blocks.flatten(1).float(), order, dim=1)  # [n]
    scores = norms.new_zeros(layout.grid)
    scores[layout.rows.to(norms.device), layout.cols.to(norms.device)] = norms
    return scores
