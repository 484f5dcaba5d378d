"""WeightBlocks: the blocks of the vector in turn, without looking at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_sparse.compressors.sample import entries
from lightning_sparse.kernels.pieces import index_dtype
from lightning_sparse.protocols import Accumulator
from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector


@dataclass(frozen=True)
class WeightBlocks:
    """One contiguous block of density * numel entries, the next one at the next exchange; the same on every rank.

    Nothing is selected: every entry leaves once in about 1 / density exchanges, zeros included. Ranks agree on the
    block, so that its values can be summed where they meet (``CompressedAllReduce``) and no index need travel
    (``Quantized``). The last block of a round is moved back to end with the vector.

    Source: blocks as in Foroutan Eghlidi and Jaggi, "Sparse Communication for Training Deep Networks",
    https://arxiv.org/abs/2009.09271, which draws them at random; here they follow each other.

    Example:
        >>> WeightBlocks().capacity(numel=1000, density=0.08)
        80
    """

    scope: ClassVar[str] = "model"
    agreed: ClassVar[bool] = True

    def capacity(self, numel: int, density: float) -> int:
        return entries(numel, density)

    def compress(self, accumulator: Accumulator, capacity: int, draw: Draw) -> SparseVector:
        numel = accumulator.numel
        rounds = -(-numel // capacity)
        start = min(draw.step % rounds * capacity, numel - capacity)
        values = accumulator.block(start, capacity)  # [capacity]
        indices = torch.arange(start, start + capacity, dtype=index_dtype(numel), device=values.device)
        return SparseVector(values, indices, numel)
