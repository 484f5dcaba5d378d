"""What the block ops refuse, in words."""

from __future__ import annotations

from torch import Tensor

from lightning_sparse.kernels.block_layout import BLOCKS, BlockLayout


def check_block(owner: str, block: int) -> None:
    """Raise ValueError unless `block` is one of `BLOCKS`."""
    if block not in BLOCKS:
        raise ValueError(f"{owner}: block must be one of {BLOCKS}, got {block}")


def check_operand(name: str, x: Tensor, columns: int, like: Tensor) -> None:
    """Raise unless x is [rows, columns] with the dtype and device of `like`."""
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"{name} must be [rows, {columns}], got {list(x.shape)}")
    if x.dtype != like.dtype or x.device != like.device:
        raise TypeError(f"{name} must be {like.dtype} on {like.device}, got {x.dtype} on {x.device}")


def check_blocks(blocks: Tensor, layout: BlockLayout) -> None:
    """Raise unless blocks are [n, block, block] as the layout says."""
    want = [layout.count, layout.block, layout.block]
    if list(blocks.shape) != want:
        raise ValueError(f"blocks must be {want}, got {list(blocks.shape)}")
