"""WeightBlocks: the blocks of the vector in turn, without looking at it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lightning_sparse.block import Block
from lightning_sparse.protocols import Accumulator
from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector

# rounds after which the order of blocks is shifted
_SHIFT = 16


@dataclass(frozen=True)
class WeightBlocks:
    """One contiguous block of the vector, the next one at the next exchange; the same on every rank.

    The vector is cut into 1 / density blocks, rounded up, so every entry leaves once in that many exchanges, zeros
    included; nothing is selected. Ranks agree on the block, so that its values can be summed where they meet
    (``CompressedAllReduce``) and no index need travel (``Quantized``). Every 16 rounds the order is shifted by a draw,
    so that no entry is left out where only every second exchange is of one vector, or the density keeps changing.

    Source: blocks as in Foroutan Eghlidi and Jaggi, "Sparse Communication for Training Deep Networks",
    https://arxiv.org/abs/2009.09271, which draws them at random; here they follow each other.

    Example:
        >>> WeightBlocks().capacity(numel=1000, density=0.3)
        250
    """

    scope: ClassVar[str] = "model"
    agreed: ClassVar[bool] = True

    def capacity(self, numel: int, density: float) -> int:
        return -(-numel // math.ceil(1 / density))

    def compress(self, accumulator: Accumulator, capacity: int, draw: Draw) -> SparseVector:
        numel = accumulator.numel
        rounds = -(-numel // max(1, capacity)) or 1
        shift = Draw(draw.seed, draw.step // (_SHIFT * rounds), draw.name).below(rounds)
        # the last block is moved back to end with the vector
        start = min((draw.step + shift) % rounds * capacity, numel - capacity)
        values = accumulator.block(start, capacity)  # [capacity]
        return Block(values, start, capacity, numel)
