"""SampledTopK: entries above a threshold that a sample of the vector suggests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_sparse.compressors.sample import check_scope, entries, sampled_threshold
from lightning_sparse.protocols import Accumulator
from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector


@dataclass(frozen=True)
class SampledTopK:
    """Entries whose magnitude reaches a quantile estimated from a sample: one dense pass, no sort of the vector.

    About k = density * numel entries reach it. More than k never leave: what does not fit stays in the memory, and the
    place where filling starts moves with every step, so that no coordinate waits for ever. Zero and NaN are never
    sent.

    Source: Lin et al., "Deep Gradient Compression", https://arxiv.org/abs/1712.01887, section 3.1 (threshold from
    a 0.1 % to 1 % sample).

    Args:
        sample: share of the vector read for the estimate, in (0, 1]; at least 16384 entries are.
        scope: what one selection runs over: "layer", "bucket" or "model".

    Example:
        >>> SampledTopK(sample=0.01).capacity(numel=1000, density=0.1)
        100
    """

    sample: float = 0.01
    agreed: ClassVar[bool] = False
    scope: str = "model"

    def __post_init__(self) -> None:
        check_scope("SampledTopK", self.scope)
        if not 0 < self.sample <= 1:
            raise ValueError(f"SampledTopK: sample must be in (0, 1], got {self.sample}")

    def capacity(self, numel: int, density: float) -> int:
        return entries(numel, density)

    def compress(self, accumulator: Accumulator, capacity: int, draw: Draw) -> SparseVector:
        threshold = sampled_threshold(accumulator, capacity, self.sample, 0.0, draw)
        # a fixed start would favour the front of the vector whenever too many entries qualify
        start = draw.below(max(1, accumulator.numel))
        return accumulator.select(threshold, capacity, start)[0]
