"""Block: neighbouring entries of a vector, read and changed as slices of its pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sparse.accumulator import overlaps
from lightning_sparse.kernels.pieces import index_dtype
from lightning_sparse.vector import SparseVector


class Block(SparseVector):
    """A sparse vector whose entries are ``start``, ``start + 1``, ..., known on the host; padding follows.

    Its indices are made when somebody asks for them.

    Args:
        values: [capacity] float32.
        start: the first entry.
        count: entries, in [0, capacity]; the rest is padding.
        numel: length of the vector.

    Example:
        >>> block = Block(torch.tensor([2.0, 3.0, 0.0]), start=4, count=2, numel=8)
        >>> block.indices.tolist()
        [4, 5, 0]
        >>> block.add_to([pieces := torch.zeros(8)]); pieces.tolist()
        [0.0, 0.0, 0.0, 0.0, 2.0, 3.0, 0.0, 0.0]
    """

    start: int
    count: int

    def __init__(self, values: Tensor, start: int, count: int, numel: int) -> None:
        for name, value in (("values", values), ("start", start), ("count", count), ("numel", numel)):
            object.__setattr__(self, name, value)

    @property
    def indices(self) -> Tensor:
        """[capacity] int32, or int64 where numel does not fit."""
        dtype = index_dtype(self.numel)
        entries = torch.arange(self.start, self.start + self.count, dtype=dtype, device=self.values.device)
        return F.pad(entries, (0, self.capacity - self.count))

    def with_values(self, values: Tensor) -> Block:
        """The same entries with other values: [capacity] float32."""
        return Block(values, self.start, self.count, self.numel)

    def sections(self, count: int) -> list[Block]:
        """``count`` blocks of equal capacity, end to end."""
        capacity, out = max(1, -(-self.capacity // count)), []
        for first in range(0, count * capacity, capacity):
            values, entries = self.values[first : first + capacity], min(max(self.count - first, 0), capacity)
            if values.numel() < capacity:
                values = F.pad(values, (0, capacity - values.numel()))
            # one without entries lies at the front, as padding does
            out.append(Block(values, self.start + first if entries else 0, entries, self.numel))
        return out

    def read(self, pieces: Sequence[Tensor]) -> Tensor:
        """What ``pieces`` hold at the entries, perhaps in place: [capacity] float32, 0 for padding."""
        parts = [part.float() for part in self._parts(pieces)]
        if self.count < self.capacity:
            parts.append(self.values.new_zeros(self.capacity - self.count))
        return parts[0] if len(parts) == 1 else torch.cat([self.values[:0], *parts])

    def write_to(self, pieces: Sequence[Tensor]) -> None:
        """Put the values into ``pieces``, in place."""
        parts = self._parts(pieces)
        for part, new in zip(parts, self._split(self.values, parts), strict=True):
            part.copy_(new)

    def add_to(self, pieces: Sequence[Tensor], alpha: float = 1.0) -> None:
        parts = self._parts(pieces)
        # scaled apart from the sum, as `scatter_add_` does it
        products = self.values if alpha == 1 else self.values * alpha
        for part, new in zip(parts, self._split(products, parts), strict=True):
            part.add_(new)

    def _parts(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [piece[a:b] for piece, a, b in overlaps(pieces, self.start, self.count) if a < b]

    def _split(self, values: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return values[: self.count].split([part.numel() for part in parts])


def as_block(vector: SparseVector) -> Block:
    """The vector itself, or what its indices say; reads them on the host.

    Raises:
        ValueError: its entries are not neighbours.
    """
    if isinstance(vector, Block):
        return vector
    if not vector.capacity:
        return Block(vector.values, 0, 0, vector.numel)
    # padding is what has index 0 behind the first entry
    count = 1 + (vector.indices[1:] > 0).sum()
    start, last, entries = torch.stack([vector.indices[0].long(), vector.indices.max().long(), count]).tolist()
    if last - start + 1 != entries:
        raise ValueError("expected neighbouring entries, got others: use compressor=WeightBlocks()")
    return Block(vector.values, start, entries, vector.numel)
