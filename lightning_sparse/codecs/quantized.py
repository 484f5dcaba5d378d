"""Quantized: one position for a whole block, and its values in a few bits each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sparse.kernels.pieces import index_dtype
from lightning_sparse.vector import SparseVector

# step over root mean square with the least mean squared error for normal values
_STEPS = {1: 1.5958, 2: 0.9957, 4: 0.3352, 8: 0.0308}
# two int64: where the block begins, how many entries it has
_HEAD = 16


@dataclass(frozen=True)
class Quantized:
    """Values on an evenly spaced grid of ``2 ** bits`` levels without zero, scaled for each group; for blocks only.

    The grid's step fits normal values at first; the group's scale is then the one of least squared error, so a group
    never loses more than it had: what is left is no longer than what was sent was, whatever the values. The rounding
    error stays in the memory. With one bit this is sign times mean magnitude.

    Source: steps from Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6 (1960), table II (that for 8
    bits computed here); one bit as in Karimireddy et al., "Error Feedback Fixes SignSGD",
    https://arxiv.org/abs/1901.09847.

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
    bits: int = 4
    group: int = 256

    def __post_init__(self) -> None:
        if self.bits not in _STEPS:
            raise ValueError(f"Quantized: bits must be one of {tuple(_STEPS)}, got {self.bits!r}")
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 8 or self.group % 8:
            raise ValueError(f"Quantized: group must be a multiple of 8, got {self.group!r}")

    def nbytes(self, numel: int, capacity: int) -> int:
        return _HEAD + 2 * self._groups(capacity) + -(-capacity * self.bits // 8)

    def encode(self, vector: SparseVector) -> Tensor:
        """Raises ValueError unless the entries are a block: neighbours, then padding."""
        capacity, indices = vector.capacity, vector.indices.long()
        # padding is what has index 0 behind the first entry
        count = 1 + (indices[1:] > 0).sum() if capacity else torch.zeros((), dtype=torch.int64, device=indices.device)
        start = indices[0] if capacity else torch.zeros_like(count)
        if capacity and not indices.is_cuda and int(indices.max()) != int(start + count - 1):
            raise ValueError("Quantized: expected neighbouring entries, got others: use it with WeightBlocks()")
        values = self._by_group(vector.values, capacity)  # [g, group]
        live = self._by_group((torch.arange(capacity, device=indices.device) < count).float(), capacity)
        step = (values.square().sum(1) / live.sum(1).clamp_min(1)).sqrt() * _STEPS[self.bits]  # [g]
        half = 2 ** (self.bits - 1)
        # a group of zeros has no step: any code will do
        levels = (values / step.clamp_min(1e-38).unsqueeze(1)).floor().clamp_(-half, half - 1)
        grid = (levels + 0.5) * live
        scale = (values * grid).sum(1) / grid.square().sum(1).clamp_min(1e-38)
        # NaN and inf make the scale NaN, which receivers see
        scale = torch.where(step.isfinite(), scale, torch.nan).bfloat16()
        codes = (levels + half).nan_to_num_(0.0).to(torch.uint8).flatten()[:capacity]
        head = torch.stack([start, count]).view(torch.uint8)
        return torch.cat([head, scale.view(torch.uint8), self._pack(codes)])  # [b] uint8

    def decode(self, wire: Tensor, numel: int, capacity: int) -> SparseVector:
        expected = self.nbytes(numel, capacity)
        if wire.dtype is not torch.uint8 or wire.shape != (expected,):
            raise ValueError(
                f"Quantized: expected a [{expected}] uint8 payload for {capacity} entries of {numel},"
                f" got {list(wire.shape)} {wire.dtype}: ranks disagree on the model, the density or the codec"
            )
        # slices may be misaligned for their type, so they are copied
        start, count = wire[:_HEAD].clone().view(torch.int64).unbind()
        if not wire.is_cuda and not (int(start) >= 0 and 0 <= int(count) <= capacity and int(start + count) <= numel):
            raise ValueError(
                f"Quantized: expected a block in [0, {numel}) of at most {capacity} entries,"
                f" got {int(count)} from {int(start)}: corrupt payload"
            )
        groups = self._groups(capacity)
        scale = wire[_HEAD : _HEAD + 2 * groups].clone().view(torch.bfloat16).float()  # [g]
        levels = self._unpack(wire[_HEAD + 2 * groups :], capacity).float() - 2 ** (self.bits - 1)
        values = (self._by_group(levels + 0.5, capacity) * scale.unsqueeze(1)).flatten()[:capacity]
        position = torch.arange(capacity, device=wire.device)
        live = position < count
        values = torch.where(live, values, 0.0)
        indices = torch.where(live, position + start, 0).to(index_dtype(numel))
        return SparseVector(values, indices, numel)

    def _groups(self, capacity: int) -> int:
        return -(-capacity // self.group)

    def _by_group(self, x: Tensor, capacity: int) -> Tensor:
        """[g, group] from [capacity], filled up with zeros."""
        return F.pad(x, (0, self._groups(capacity) * self.group - capacity)).view(-1, self.group)

    def _pack(self, codes: Tensor) -> Tensor:
        """[ceil(n * bits / 8)] uint8 from [n] codes, the first in the lowest bits."""
        per = 8 // self.bits
        if per == 1:
            return codes
        rows = F.pad(codes, (0, -codes.numel() % per)).view(-1, per)
        return (rows << self._shifts(codes.device)).sum(1, dtype=torch.uint8)

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        """[count] codes."""
        rows = (packed.unsqueeze(1) >> self._shifts(packed.device)) & (2**self.bits - 1)
        return rows.flatten()[:count]

    def _shifts(self, device: torch.device) -> Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)
