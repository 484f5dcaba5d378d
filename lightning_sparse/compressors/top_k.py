"""TopK: the k largest magnitudes, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.compressors.sample import check_scope, entries, sampled_threshold
from lightning_sparse.kernels.kth_largest import kth_largest
from lightning_sparse.kernels.pieces import index_dtype
from lightning_sparse.kernels.select import select
from lightning_sparse.protocols import Accumulator
from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector

# below this, sampling costs more than it saves
_DIRECT = 65_536
# entries of the sample above the bound: four of their standard deviations are 18 % more candidates
_ABOVE = 512


@dataclass(frozen=True)
class TopK:
    """The k entries of largest magnitude, exactly; k = density * numel.

    A sampled lower bound admits slightly more than k candidates in one dense pass, and only those are
    compared; where the bound turns out too high or too low, radix select finds the k-th largest magnitude. Entries that
    are zero or NaN are never sent. Among equal magnitudes at the boundary any may be sent; the others gain on them in
    the memory.

    Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent",
    https://arxiv.org/abs/1704.05021, section 3.

    Raises:
        ValueError: ``scope`` is none of the three.

    Args:
        scope: what one selection runs over. "model" compares all layers with each other, "bucket" what is exchanged
            together (``bucket_cap_mb``), "layer" gives every parameter the same density.

    Example:
        >>> TopK(scope="layer").capacity(numel=1000, density=0.01)
        10
    """

    agreed: ClassVar[bool] = False
    scope: str = "model"

    def __post_init__(self) -> None:
        check_scope("TopK", self.scope)

    def capacity(self, numel: int, density: float) -> int:
        return entries(numel, density)

    def compress(self, accumulator: Accumulator, capacity: int, draw: Draw) -> SparseVector:
        if accumulator.numel > _DIRECT and 0 < capacity * 8 < accumulator.numel:
            threshold = sampled_threshold(accumulator, capacity, min(0.01, _ABOVE / capacity), 4.0, draw)
            room = 2 * capacity + _DIRECT // 8
            found, count = accumulator.select(threshold, room, 0)
            enough = int(count) >= capacity or float(threshold) == 0.0
            if enough and int(count) <= room:
                return _largest(found, int(count), capacity)
        pieces = accumulator.pieces()
        if accumulator.numel > _DIRECT and capacity:
            return _largest_by_threshold(pieces, accumulator.numel, capacity)
        return _largest_of(pieces, capacity)


def _largest(found: SparseVector, count: int, capacity: int) -> SparseVector:
    """The ``capacity`` largest of the first ``count`` entries, in the order of their indices."""
    if count <= capacity:
        return SparseVector(found.values[:capacity], found.indices[:capacity], found.numel)
    magnitudes = found.values[:count].abs()
    # the candidates are few more than what is kept: what is dropped is found sooner
    least = torch.topk(magnitudes, count - capacity, largest=False, sorted=False).indices
    kept = torch.ones(count, dtype=torch.bool, device=magnitudes.device).index_fill_(0, least, False)
    at = kept.nonzero().view(-1)  # [capacity]
    return SparseVector(found.values[at], found.indices[at], found.numel)


def _largest_by_threshold(pieces: list[Tensor], numel: int, capacity: int) -> SparseVector:
    """Entries above the k-th largest magnitude, and as many that equal it, in index order, as still fit."""
    threshold = kth_largest(pieces, capacity)
    # the next float; above infinity comes NaN, which nothing exceeds
    above = select(pieces, (threshold.view(torch.int32) + 1).view(torch.float32), capacity)
    # in no more entries than fit, there are at least as many equal ones as those above leave room for
    reaching = select(pieces, threshold, capacity)
    equal = (reaching[0] != 0) & (reaching[0].abs() == threshold)  # [capacity]
    kept = torch.cat([above[0] != 0, equal & (equal.cumsum(0) <= capacity - above[2])])  # [2 * capacity]
    indices = torch.cat([above[1], reaching[1]])
    # in index order, what is not kept behind
    order = torch.where(kept, indices, numel).argsort(stable=True)[:capacity]
    values = torch.where(kept, torch.cat([above[0], reaching[0]]), 0.0)[order]
    return SparseVector(values, torch.where(kept, indices, 0)[order], numel)


def _largest_of(pieces: list[Tensor], capacity: int) -> SparseVector:
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # [n]
    magnitudes = flat.abs().nan_to_num_(nan=0.0, posinf=torch.inf)
    indices = torch.sort(torch.topk(magnitudes, capacity, sorted=False).indices).values
    live = magnitudes[indices] > 0
    # entries of magnitude zero become padding, behind the live ones
    order = torch.argsort((~live).to(torch.uint8), stable=True)
    values = torch.where(live, flat[indices], 0.0)[order]
    indices = torch.where(live, indices, 0)[order]
    return SparseVector(values, indices.to(index_dtype(flat.numel())), flat.numel())
