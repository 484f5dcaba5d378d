"""Which blocks of a matrix are stored, and in what order the block ops visit them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Visits:
    """Stored blocks, grouped by the block of the result they add to, for kernels.

    Args:
        starts: [groups + 1] int32: where each group begins in the other two.
        slots: [n] int32: positions in storage, ascending within a group.
        others: [n] int32: the block of the operand that each is multiplied with.
    """

    starts: Tensor
    slots: Tensor
    others: Tensor


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Places of n stored blocks in a matrix that maps `in_features` to `out_features`.

    Stored block s, [block, block], maps the inputs of block column `cols[s]` to the outputs of block row `rows[s]`: its
    entry (i, o) is the weight from input cols[s] * block + i to output rows[s] * block + o. Where a size is no multiple
    of the block, the last blocks reach beyond it: what lies there must be finite, counts for nothing, and comes out as
    zero.

    Args:
        rows: [n] int64 on the CPU.
        cols: [n] int64 on the CPU; pairs (row, col) are unique, in any order.
        out_features: at least 1.
        in_features: at least 1.
        block: one of `BLOCKS`.
    """

    rows: Tensor
    cols: Tensor
    out_features: int
    in_features: int
    block: int
    _visits: dict[tuple[torch.device, bool], Visits] = field(default_factory=dict, repr=False)
    _places: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, mask: Tensor, out_features: int, in_features: int, block: int) -> BlockLayout:
        """The layout of a [block rows, block columns] bool mask, its blocks in row-major order."""
        rows, cols = mask.cpu().nonzero(as_tuple=True)
        return cls(rows, cols, out_features, in_features, block)

    @property
    def count(self) -> int:
        """Stored blocks, n."""
        return self.rows.numel()

    def same_as(self, other: BlockLayout) -> bool:
        """Whether the same blocks lie in the same slots, of equal sizes."""
        if self is other:
            return True
        sizes, others = ((x.out_features, x.in_features, x.block) for x in (self, other))
        return sizes == others and torch.equal(self.rows, other.rows) and torch.equal(self.cols, other.cols)

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns, live or not."""
        return -(-self.out_features // self.block), -(-self.in_features // self.block)

    @property
    def fits(self) -> bool:
        """True where all blocks lie within the matrix, no two of them at one place."""
        height, width = self.grid
        inside = (self.rows >= 0) & (self.rows < height) & (self.cols >= 0) & (self.cols < width)
        return bool(inside.all()) and (self.rows * width + self.cols).unique().numel() == self.count

    @cached_property
    def mask(self) -> Tensor:
        """[block rows, block columns] bool on the CPU: True where a block is stored."""
        mask = torch.zeros(self.grid, dtype=torch.bool)
        mask[self.rows, self.cols] = True
        return mask

    @cached_property
    def even(self) -> bool:
        """True where no block reaches beyond the matrix."""
        return self.in_features % self.block == 0 and self.out_features % self.block == 0

    @cached_property
    def weights(self) -> int:
        """Weights in stored blocks, without what reaches beyond the matrix."""
        heights = (self.out_features - self.rows * self.block).clamp(max=self.block)
        widths = (self.in_features - self.cols * self.block).clamp(max=self.block)
        return int((heights * widths).sum())

    @cached_property
    def order(self) -> Tensor | None:
        """[n] int64: slots by block row, ascending within one; None where storage has that order already."""
        order = self.rows.argsort(stable=True)
        return None if torch.equal(order, torch.arange(self.count)) else order

    @cached_property
    def row_pieces(self) -> list[tuple[int, int, int, Tensor | slice]]:
        """(block row, begin, end, block columns) of each block row with blocks; begin and end count in `order`.

        Columns that follow each other are a slice, so that indexing with them makes a view.
        """
        cols = self.cols if self.order is None else self.cols[self.order]
        ends = self.rows.bincount(minlength=self.grid[0]).cumsum(0).tolist()
        pieces = []
        begin = 0
        for row, end in enumerate(ends):
            if end > begin:
                pieces.append((row, begin, end, _as_slice(cols[begin:end])))
            begin = end
        return pieces

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block row and block column of each slot, [n] int32 each, on a device; made once."""
        if device not in self._places:
            rows, cols = (table.to(torch.int32).to(device) for table in (self.rows, self.cols))
            self._places[device] = rows, cols
        return self._places[device]

    def visits(self, device: torch.device, transposed: bool = False) -> Visits:
        """Blocks grouped by block row, or by block column if `transposed`, on a device; made once."""
        key = device, transposed
        if key not in self._visits:
            groups, others = (self.cols, self.rows) if transposed else (self.rows, self.cols)
            slots = groups.argsort(stable=True)
            starts = torch.zeros(self.grid[transposed] + 1, dtype=torch.int64)
            torch.cumsum(groups.bincount(minlength=self.grid[transposed]), 0, out=starts[1:])
            tables = (table.to(torch.int32).to(device) for table in (starts, slots, others[slots]))
            self._visits[key] = Visits(*tables)
        return self._visits[key]


def _as_slice(indices: Tensor) -> Tensor | slice:
    first = int(indices[0])
    run = torch.arange(first, first + indices.numel())
    return slice(first, first + indices.numel()) if torch.equal(indices, run) else indices
