"""The table of algorithms under contract. A new one adds one row here; `test_laws.py` does the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_sparse.codecs import Raw
from lightning_sparse.communicators import AllGather
from lightning_sparse.compressors import SampledTopK, TopK
from lightning_sparse.memory import MomentumResidual, NoMemory, Residual


@dataclass(frozen=True)
class Row:
    """One algorithm: how to build it, and what its laws may rely on."""

    build: Any
    exact: bool = True
    """Codec: bit for bit. Compressor: the k largest magnitudes. Memory: nothing is lost."""
    relative_error: float = 0.0
    """Codec: largest error of a value over its magnitude."""


COMPRESSORS = {
    "TopK": Row(TopK),
    "TopK layer": Row(lambda: TopK(scope="layer")),
    "SampledTopK": Row(SampledTopK, exact=False),
}
CODECS = {
    "Raw fp32": Row(lambda: Raw("fp32")),
    "Raw bf16": Row(lambda: Raw("bf16"), exact=False, relative_error=2.0**-8),
    "Raw fp16": Row(lambda: Raw("fp16"), exact=False, relative_error=2.0**-10),
}
MEMORIES = {
    "Residual": Row(Residual),
    "MomentumResidual": Row(lambda: MomentumResidual(0.9)),
    "NoMemory": Row(NoMemory, exact=False),
}
COMMUNICATORS = {"AllGather": Row(AllGather)}
