"""Buffer: neighbouring entries of a vector that lies in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sparse.accumulator import overlaps


class Buffer:
    """The part of a vector that a block's section stands for.

    Args:
        pieces: of the vector, flat float32.
        indices: of the section: neighbours, then padding (index 0). Two of them are read on the host.
    """

    def __init__(self, pieces: Sequence[Tensor], indices: Tensor) -> None:
        self._capacity = indices.numel()
        start, last = torch.stack([indices[0], indices.max()]).tolist() if self._capacity else (0, -1)
        self._count = last - start + 1
        self._empty = indices.new_zeros(0, dtype=torch.float32)
        self._parts = [v[a:b] for v, a, b in overlaps(pieces, start, self._count) if a < b]

    def read(self) -> Tensor:
        """[capacity] float32, 0 for padding."""
        return F.pad(torch.cat([self._empty, *self._parts]), (0, self._capacity - self._count))

    def write(self, values: Tensor) -> None:
        """Replace the entries by [capacity] values; those of padding are dropped."""
        sizes = [part.numel() for part in self._parts]
        for part, new in zip(self._parts, values[: self._count].split(sizes), strict=True):
            part.copy_(new)
