"""Hash tables over the rows of a matrix, to find those that point where a query points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.random import Draw

# rows hashed at a time, so that their projections stay in the cache
_BLOCK = 4096


class LSHTables:
    """Tables of SimHash codes: two vectors at angle a share a bit with probability 1 - a / pi, a code with its power.

    A table is the rows' numbers sorted by code, and where each code begins; equal codes keep the order of rows, so
    tables are a function of (rows, seed, generation) alone.

    Args:
        features: length of a row.
        tables: number of tables; a row is found that shares its code with the query in any of them.
        bits: bits of a code, 1 to 20; more make buckets smaller.
        seed: of the hash functions.

    Raises:
        ValueError: an argument out of range.

    Source: Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002.

    Example:
        >>> tables = LSHTables(features=3, tables=4, bits=2, seed=0)
        >>> rows = torch.eye(3)
        >>> tables.build(rows, None)
        >>> 1 in tables.query(rows[1:2], bucket=8, shift=torch.zeros(4, dtype=torch.int64))
        True
    """

    def __init__(self, features: int, tables: int, bits: int, seed: int) -> None:
        if tables < 1:
            raise ValueError(f"LSHTables: tables must be at least 1, got {tables}")
        if not 1 <= bits <= 20:
            raise ValueError(f"LSHTables: bits must be in [1, 20], got {bits}")
        self.features, self.tables, self.bits, self.seed = features, tables, bits, seed
        self.order = torch.empty(tables, 0, dtype=torch.int32)  # [tables, n] rows, by code
        self.starts = torch.zeros(tables, 2**bits + 1, dtype=torch.int64)  # [tables, 2 ** bits + 1]
        self._has_offsets = False
        self._generation = -1
        self._planes = torch.empty(0)

    @torch.no_grad()
    def build(self, rows: Tensor, offsets: Tensor | None, generation: int = 0) -> None:
        """Hash all rows anew.

        Rows are centred first: taking the same vector from all of them changes no query's ranking of its products,
        and evens out the buckets.

        Args:
            rows: [n, features] float.
            offsets: [n] added to the products that queries are after, such as a bias, or None.
            generation: another number draws other hash functions.
        """
        planes = self._hyperplanes(generation, rows.device)
        self._has_offsets = offsets is not None
        centre = rows.mean(0).float() @ planes[:-1]  # [tables * bits]
        level = None if offsets is None else (offsets - offsets.mean()).float()
        codes = torch.cat(
            [
                self._codes(rows[at : at + _BLOCK], planes, -centre, None if level is None else level[at : at + _BLOCK])
                for at in range(0, len(rows), _BLOCK)
            ]
        )  # [n, tables]
        order, starts = [], []
        for code in codes.t().contiguous():
            order.append(code.sort(stable=True).indices.int())
            counts = torch.bincount(code.long(), minlength=2**self.bits)
            starts.append(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        self.order, self.starts = torch.stack(order), torch.stack(starts)

    def state_dict(self) -> dict[str, Any]:
        """The tables as they are; equal rows give others once they are hashed by other functions."""
        state = {"order": self.order, "starts": self.starts}
        return state | {"has_offsets": self._has_offsets, "generation": self._generation}

    def load_state_dict(self, state: Mapping[str, Any], rows: int, device: torch.device) -> bool:
        """Takes tables of so many rows; returns False, and changes nothing, if the state's are of another form."""
        order, starts = state["order"], state["starts"]
        if order.shape != (self.tables, rows) or starts.shape != self.starts.shape:
            return False
        self.order, self.starts, self._has_offsets = order.to(device), starts.to(device), state["has_offsets"]
        self._hyperplanes(state["generation"], device)
        return True

    @torch.no_grad()
    def codes(self, queries: Tensor) -> Tensor:
        """[b, tables] int32, or int16 up to 15 bits, of queries [b, features]."""
        planes = self._hyperplanes(max(0, self._generation), queries.device)
        return self._codes(queries, planes, planes[-1] * self._has_offsets, None)

    @torch.no_grad()
    def query(self, queries: Tensor, bucket: int, shift: Tensor) -> Tensor:
        """Rows that share a code with each query: [b, tables * bucket] int64, -1 where there are fewer.

        Args:
            queries: [b, features] float.
            bucket: rows taken of each bucket, at most.
            shift: [tables] int64, where to begin in buckets that hold more.
        """
        codes = self.codes(queries).long().t()  # [tables, b]
        first, last = self.starts.gather(1, codes), self.starts.gather(1, codes + 1)
        size = (last - first)[..., None]  # [tables, b, 1]
        place = torch.arange(bucket, device=queries.device)
        # buckets that fit are read from the start
        begin = torch.where(size > bucket, shift[:, None, None], 0)
        position = first[..., None] + (begin + place) % size.clamp(min=1)
        position = torch.where(place < size, position, 0)  # [tables, b, bucket]
        found = self.order.gather(1, position.flatten(1)).view_as(position).long()
        found = torch.where(place < size, found, -1)
        return found.permute(1, 0, 2).flatten(1)

    def _codes(self, x: Tensor, planes: Tensor, shift: Tensor, level: Tensor | None) -> Tensor:
        signs = torch.addmm(shift, x.float(), planes[:-1])  # [m, tables * bits]
        if level is not None:
            signs.addr_(level, planes[-1])
        powers = (2.0 ** torch.arange(self.bits, device=x.device)).repeat(self.tables)
        weights = torch.block_diag(*powers.view(self.tables, self.bits, 1))  # [tables * bits, tables]
        # exact in fp32: codes stay below 2 ** 20
        return (signs.gt_(0) @ weights).to(torch.int16 if self.bits < 16 else torch.int32)

    def _hyperplanes(self, generation: int, device: torch.device) -> Tensor:
        """[features + 1, tables * bits] standard normal, the last row for the offset."""
        if generation != self._generation or self._planes.device != device:
            numel = (self.features + 1) * self.tables * self.bits
            uniform = (Draw(self.seed, generation, "hash functions").bits(numel).double() + 0.5) / 2**32
            normal = math.sqrt(2) * torch.erfinv(2 * uniform - 1)
            self._planes = normal.float().view(self.features + 1, -1).to(device)
            self._generation = generation
        return self._planes
