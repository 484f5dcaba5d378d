"""What the CPU paths of the block ops share: operands by block columns, gathered for one block row at a time."""

from __future__ import annotations

from torch import Tensor

from lightning_sparse.kernels.block_layout import BlockLayout

# rows of the operand that the CPU multiplies at a time: what it gathers then stays in the cache
ROWS = 256


def block_columns(x: Tensor, layout: BlockLayout) -> Tensor:
    """x [m, in_features] as [block columns, block, m], zero beyond `in_features`."""
    columns = x.new_empty(layout.grid[1] * layout.block, x.shape[0])
    columns[: layout.in_features].copy_(x.t())
    columns[layout.in_features :].zero_()
    return columns.view(layout.grid[1], layout.block, x.shape[0])


def stacked(columns: Tensor, cols: Tensor | slice) -> Tensor:
    """Some of [block columns, block, m] below each other: [k * block, m]; a view for a slice of them."""
    picked = columns[cols] if isinstance(cols, slice) else columns.index_select(0, cols.to(columns.device))
    return picked.flatten(0, 1)


def row_slices(layout: BlockLayout, row: int) -> tuple[slice, int]:
    """The outputs of a block row, and how many they are."""
    begin = row * layout.block
    end = min(begin + layout.block, layout.out_features)
    return slice(begin, end), end - begin
