"""SparseVector: k entries of a flat vector, padded to a capacity that every rank can compute beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.kernels.pieces import index_dtype
from lightning_sparse.kernels.scatter_add import scatter_add_


@dataclass(frozen=True)
class SparseVector:
    """Entries picked from a flat vector of ``numel`` elements.

    Invariants: entries come first, with unique indices in [0, numel) in ascending order; padding (value 0, index 0)
    follows. An entry of value 0 counts as padding, except among agreed entries, which keep their places. Both tensors
    have the same length, the capacity.

    Args:
        values: [capacity] float32.
        indices: [capacity] int32, or int64 where numel does not fit.
        numel: length of the vector the entries were picked from.

    Example:
        >>> vector = SparseVector(torch.tensor([2.0, 0.0]), torch.tensor([1, 0], dtype=torch.int32), 3)
        >>> vector.dense().tolist()
        [0.0, 2.0, 0.0]
    """

    values: Tensor
    indices: Tensor
    numel: int

    @property
    def capacity(self) -> int:
        """Entries the payload can hold."""
        return self.values.numel()

    def add_to(self, pieces: Sequence[Tensor], alpha: float = 1.0) -> None:
        """``concat(pieces)[indices] += alpha * values``, in place, each product and each sum rounded once.

        Args:
            pieces: the vector, [numel of piece] float32, bfloat16 or float16 each.
            alpha: finite.
        """
        scatter_add_(pieces, self.values, self.indices, alpha)

    def dense(self) -> Tensor:
        """The vector with zeros everywhere else: [numel] float32. For tests and small vectors."""
        out = torch.zeros(self.numel, dtype=torch.float32, device=self.values.device)
        return out.index_add_(0, self.indices.long(), self.values) if self.numel else out


def concatenate(vectors: Sequence[SparseVector]) -> SparseVector:
    """Join vectors end to end; the indices of each are shifted by the lengths before it."""
    if len(vectors) == 1:
        return vectors[0]
    numel = sum(vector.numel for vector in vectors)
    dtype = index_dtype(numel)
    values = torch.cat([vector.values for vector in vectors])  # [capacity]
    shifted, offset = [], 0
    for vector in vectors:
        shifted.append(vector.indices.to(torch.int64) + offset)
        offset += vector.numel
    # padding of every vector moves behind the last real entry; a stable sort keeps the rest in order
    order = torch.where(values == 0, numel, torch.cat(shifted)).argsort(stable=True)
    values = values[order]
    indices = torch.cat(shifted)[order].masked_fill_(values == 0, 0)
    return SparseVector(values, indices.to(dtype), numel)
