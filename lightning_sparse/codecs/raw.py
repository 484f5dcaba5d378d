"""Raw: indices as integers, values as floats, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.kernels.pieces import index_dtype
from lightning_sparse.vector import SparseVector

_VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Raw:
    """int32 indices (int64 from 2**31 elements) and float values, uncompressed.

    Exact with "fp32". With "bf16", the default, and "fp16" the rounding error stays in the memory like everything not
    sent; values beyond fp16's range are sent as its largest number.

    Args:
        values: type of the values on the wire: "fp32", "bf16" or "fp16".

    Example:
        >>> Raw().nbytes(numel=1000, capacity=10)
        60
    """

    agreed: ClassVar[bool] = False
    values: str = "bf16"

    def __post_init__(self) -> None:
        if self.values not in _VALUES:
            raise ValueError(f"Raw: values must be one of {tuple(_VALUES)}, got {self.values!r}")

    def nbytes(self, numel: int, capacity: int) -> int:
        return capacity * (index_dtype(numel).itemsize + _VALUES[self.values].itemsize)

    def encode(self, vector: SparseVector) -> Tensor:
        dtype, values = _VALUES[self.values], vector.values
        if dtype is torch.float16:
            largest = torch.finfo(dtype).max
            values = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
        indices = vector.indices.to(index_dtype(vector.numel))
        return torch.cat([indices.view(torch.uint8), values.to(dtype).view(torch.uint8)])  # [b] uint8

    def decode(self, wire: Tensor, numel: int, capacity: int) -> SparseVector:
        expected = self.nbytes(numel, capacity)
        if wire.dtype is not torch.uint8 or wire.shape != (expected,):
            raise ValueError(
                f"Raw: expected a [{expected}] uint8 payload for {capacity} entries of {numel},"
                f" got {list(wire.shape)} {wire.dtype}: ranks disagree on the model, the density or the codec"
            )
        itype = index_dtype(numel)
        head = capacity * itype.itemsize
        # a slice may be misaligned for its type, so it is copied
        indices = wire[:head].clone().view(itype)  # [capacity]
        values = wire[head:].clone().view(_VALUES[self.values]).float()  # [capacity]
        if capacity and not wire.is_cuda:
            low, high = torch.aminmax(indices)
            if int(low) < 0 or int(high) >= numel:
                raise ValueError(
                    f"Raw: expected indices in [0, {numel}), got {int(low)} to {int(high)}: corrupt payload"
                )
        return SparseVector(values, indices, numel)
