"""Sections: a payload cut into parts that are encoded one by one, so that ranks can share the work of averaging."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sparse.block import Block
from lightning_sparse.protocols import Codec
from lightning_sparse.vector import SparseVector


def cut(vector: SparseVector, count: int) -> list[SparseVector]:
    """Cut the entries, in their order, into ``count`` vectors of equal capacity; padding fills up the last ones."""
    if count == 1:
        return [vector]
    if isinstance(vector, Block):
        return list(vector.sections(count))
    capacity = max(1, -(-vector.capacity // count))
    room = count * capacity - vector.capacity
    values, indices = F.pad(vector.values, (0, room)), F.pad(vector.indices, (0, room))
    rows = zip(values.split(capacity), indices.split(capacity), strict=True)
    return [SparseVector(v, i, vector.numel) for v, i in rows]


def encode_sections(vector: SparseVector, count: int, codec: Codec) -> tuple[SparseVector, Tensor]:
    """The payload as receivers will see it, rounding included, and its ``count`` sections: [count, b] uint8."""
    parts = cut(vector, count)
    wires = [codec.encode(part) for part in parts]
    seen = [codec.decode(wire, vector.numel, part.capacity) for wire, part in zip(wires, parts, strict=True)]
    values = torch.cat([part.values for part in seen])
    if isinstance(vector, Block):
        return vector.with_values(values), torch.stack(wires)
    return SparseVector(values, torch.cat([part.indices for part in seen]), vector.numel), torch.stack(wires)
