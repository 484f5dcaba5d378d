"""The magnitude that a given share of a vector exceeds, estimated from a sample; shared by threshold compressors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sparse.protocols import Accumulator
from lightning_sparse.random import Draw

SCOPES = ("layer", "bucket", "model")
_SMALLEST = 16_384


def check_scope(owner: str, scope: str) -> None:
    """Raise ValueError unless ``scope`` is one of ``SCOPES``."""
    if scope not in SCOPES:
        raise ValueError(f"{owner}: scope must be one of {SCOPES}, got {scope!r}")


def entries(numel: int, density: float) -> int:
    """Entries that ``density`` of ``numel`` stands for: at least 1, at most ``numel``."""
    return min(numel, max(1, math.floor(numel * density + 0.5)))


def sample_size(numel: int, sample: float) -> int:
    """Entries that are read for ``sample`` of ``numel``: at least 16384, or all."""
    return min(numel, max(_SMALLEST, math.ceil(numel * sample)))


def sampled_threshold(accumulator: Accumulator, count: int, sample: float, spread: float, draw: Draw) -> Tensor:
    """The magnitude that about ``count`` entries reach: [] float32, on the accumulator's device.

    Args:
        accumulator: the vector; ``sample`` of its entries (at least 16384) are read.
        count: how many entries should reach the threshold.
        sample: share of the vector to read, in (0, 1].
        spread: standard deviations by which the estimate is lowered, so that more rather than fewer reach it.
        draw: names the positions.
    """
    magnitudes = accumulator.sample(sample_size(accumulator.numel, sample), draw).abs_().nan_to_num_(nan=0.0)  # [m]
    if magnitudes.numel() == 0:
        return magnitudes.sum()
    expected = magnitudes.numel() * count / accumulator.numel
    rank = math.ceil(expected + spread * math.sqrt(expected) + (2 if spread else 0))
    rank = min(magnitudes.numel(), max(1, rank))
    return torch.topk(magnitudes, rank, sorted=False).values.min()
