"""Quantized: one position for a whole block, and its values in a few bits each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sparse.block import Block, as_block
from lightning_sparse.kernels.pieces import index_dtype
from lightning_sparse.vector import SparseVector

# step over root mean square
_STEPS = {2: 1.3, 4: 0.5, 8: 0.05}
# scale of one bit over the one of least squared error; at 2 a group would keep all the error it had
_OVER = 1.5
_BITS = (1, 2, 4, 8)
_TINY = torch.finfo(torch.float32).tiny
# codes in a byte -> type of a word that has one byte for each
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# two int64: where the block begins, how many entries it has
_HEAD = 16


@dataclass(frozen=True)
class Quantized:
    """Values on an evenly spaced grid of ``2 ** bits`` levels without zero, scaled for each group; for blocks only.

    The rounding error stays in the memory and comes back with the next exchange, so the grid with the least squared
    error now is not the one that keeps the least error over time: entries that are large again and again fall ever
    further behind a grid that fits the typical one. Steps are therefore wider. With 2 bits and more, the group's scale
    is then the one of least squared error for the levels taken; with one bit, sign times a scale, it is 1.5 times that
    one, the mean magnitude. A group never gains error, whatever the values.

    Source: one bit with error feedback as in Karimireddy et al., "Error Feedback Fixes SignSGD",
    https://arxiv.org/abs/1901.09847, where the scale is the mean magnitude. Steps and the factor 1.5 were chosen here.

    Args:
        bits: of a value: 1, 2, 4 or 8.
        group: values with one scale (bfloat16), a multiple of 8.

    Raises:
        ValueError: ``bits`` or ``group`` is none of these.

    Example:
        >>> Quantized(bits=4).nbytes(numel=1_000_000, capacity=80_000)
        40642
    """

    agreed: ClassVar[bool] = True
    bits: int = 1
    group: int = 256

    def __post_init__(self) -> None:
        if self.bits not in _BITS or not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise ValueError(f"Quantized: bits must be one of {_BITS}, got {self.bits!r}")
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 8 or self.group % 8:
            raise ValueError(f"Quantized: group must be a multiple of 8, got {self.group!r}")

    def nbytes(self, numel: int, capacity: int) -> int:
        return _HEAD + 2 * self._groups(capacity) + -(-capacity * self.bits // 8)

    def encode(self, vector: SparseVector) -> Tensor:
        """Raises ValueError unless the entries are a block: neighbours, then padding."""
        block, values = as_block(vector), vector.values
        # whole groups are read where they lie, the last one is filled up with zeros
        whole = vector.capacity // self.group * self.group
        scale, codes = self._groups_of(values[:whole].view(-1, self.group), block.count)
        if whole < vector.capacity:
            last = F.pad(values[whole:], (0, self.group - vector.capacity + whole)).view(1, self.group)
            last_scale, last_codes = self._groups_of(last, block.count - whole)
            scale, codes = torch.cat([scale, last_scale]), torch.cat([codes, last_codes])
        codes = codes[: -(-vector.capacity * self.bits // 8)]
        # filled on the device: a copy from the host would be waited for
        head = [torch.full((1,), n, dtype=torch.int64, device=values.device) for n in (block.start, block.count)]
        return torch.cat([*(n.view(torch.uint8) for n in head), scale.view(torch.uint8), codes])  # [b] uint8

    def decode(self, wire: Tensor, numel: int, capacity: int) -> SparseVector:
        expected = self.nbytes(numel, capacity)
        if wire.dtype is not torch.uint8 or wire.shape != (expected,):
            raise ValueError(
                f"Quantized: expected a [{expected}] uint8 payload for {capacity} entries of {numel},"
                f" got {list(wire.shape)} {wire.dtype}: ranks disagree on the model, the density or the codec"
            )
        # slices may be misaligned for their type, so they are copied
        start, count = wire[:_HEAD].clone().view(torch.int64).unbind()
        if not wire.is_cuda and not (
            int(start) >= 0 and 0 <= int(count) <= capacity and int(start) + int(count) <= numel
        ):
            raise ValueError(
                f"Quantized: expected a block in [0, {numel}) of at most {capacity} entries,"
                f" got {int(count)} from {int(start)}: corrupt payload"
            )
        groups = self._groups(capacity)
        scale = wire[_HEAD : _HEAD + 2 * groups].clone().view(torch.bfloat16).float()  # [g]
        levels = _levels(self.bits, wire.device).index_select(0, wire[_HEAD + 2 * groups :].int()).flatten()
        values, whole = levels[:capacity], capacity // self.group * self.group
        values[:whole].view(-1, self.group).mul_(scale[: whole // self.group].unsqueeze(1))
        values[whole:].mul_(scale[whole // self.group :])
        dtype = index_dtype(numel)
        if not wire.is_cuda:
            values[int(count) :] = 0
            return Block(values, int(start), int(count), numel)
        position = torch.arange(capacity, dtype=dtype, device=wire.device)
        live = position < count
        return SparseVector(torch.where(live, values, 0.0), torch.where(live, position + start, 0).to(dtype), numel)

    def _groups_of(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Scales, [g] bfloat16, and packed codes of groups of which the first ``count`` values are no padding."""
        first = torch.arange(values.shape[0], device=values.device) * self.group
        live = (count - first).clamp(0, self.group)  # [g]
        scale, codes = self._sign(values, live) if self.bits == 1 else self._grid(values, live)
        # NaN and inf make the scale NaN, which receivers see
        return torch.where(scale.isfinite(), scale, torch.nan).bfloat16(), self._pack(codes.flatten())

    def _sign(self, values: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """The scale of each group, and 1 where a value is not negative: the grid's nearest in closed form."""
        mean = values.abs().sum(1) / live.clamp_min(1)
        return _OVER * mean, (values >= 0).view(torch.uint8)

    def _grid(self, values: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """The scale of each group that leaves the least squared error, and the level of each value."""
        half = 2 ** (self.bits - 1)
        # squares of what is within [-1, 1] neither overflow nor vanish; a group of zeros stays one
        largest = values.abs().amax(1)  # [g]
        values = values / largest.clamp_min(_TINY).unsqueeze(1)
        step = (values.square().sum(1) / live.clamp_min(1)).sqrt_() * _STEPS[self.bits]  # [g]
        levels = (values / step.clamp_min(_TINY).unsqueeze(1)).floor_().clamp_(-half, half - 1)
        grid = levels + 0.5
        # padding has the value 0, so the level 0.5
        energy = grid.square().sum(1) - 0.25 * (self.group - live)
        scale = largest * (grid * values).sum(1) / energy.clamp_min(0.25)
        return torch.where(step.isfinite(), scale, torch.nan), levels.add_(half).nan_to_num_(0.0).to(torch.uint8)

    def _groups(self, capacity: int) -> int:
        return -(-capacity // self.group)

    def _pack(self, codes: Tensor) -> Tensor:
        """[n * bits / 8] uint8 from [n] uint8 codes, the first in the lowest bits; n is a multiple of 8."""
        per = 8 // self.bits
        if per == 1:
            return codes
        # one word holds the codes of one byte; the product has them side by side in its highest byte, and no carries
        words = codes.view(_WORDS[per])
        high = 8 * (per - 1)
        product = words * sum(1 << (high - (8 - self.bits) * code) for code in range(per))
        return (product >> high).to(torch.uint8)


@lru_cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """What the codes in each byte stand for, in grid steps; one bit means -1 or 1: [256, 8 / bits] float32."""
    codes = (torch.arange(256).unsqueeze(1) >> torch.arange(0, 8, bits)) & (2**bits - 1)
    levels = codes - 2 ** (bits - 1) + 0.5
    return (levels * 2 if bits == 1 else levels).to(device)
