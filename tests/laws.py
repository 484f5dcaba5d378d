"""The table of algorithms under contract. A new one adds one row here; `test_laws.py` does the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_sparse.codecs import Quantized, Raw
from lightning_sparse.communicators import AllGather, CompressedAllReduce
from lightning_sparse.compressors import SampledTopK, TopK, WeightBlocks
from lightning_sparse.memory import MomentumResidual, NoMemory, Residual


@dataclass(frozen=True)
class Row:
    """One algorithm: how to build it, and what its laws may rely on."""

    build: Any
    exact: bool = True
    """Codec: bit for bit. Compressor: the k largest magnitudes. Memory: nothing is lost."""
    relative_error: float = 0.0
    """Codec: largest error of a value over its magnitude."""
    energy_error: float = 0.0
    """Codec for agreed entries: squared error of normal values over their squares."""
    agreed: bool = False
    """Compressor: ranks pick the same entries. Codec, communicator: they need that."""


COMPRESSORS = {
    "TopK": Row(TopK),
    "TopK layer": Row(lambda: TopK(scope="layer")),
    "SampledTopK": Row(SampledTopK, exact=False),
    "WeightBlocks": Row(WeightBlocks, exact=False, agreed=True),
}
CODECS = {
    "Raw fp32": Row(lambda: Raw("fp32")),
    "Raw bf16": Row(lambda: Raw("bf16"), exact=False, relative_error=2.0**-8),
    "Raw fp16": Row(lambda: Raw("fp16"), exact=False, relative_error=2.0**-10),
    **{
        f"Quantized {bits} bits": Row(lambda bits=bits: Quantized(bits), exact=False, energy_error=error, agreed=True)
        for bits, error in {1: 0.55, 2: 0.16, 4: 0.022, 8: 3e-4}.items()
    },
}
MEMORIES = {
    "Residual": Row(Residual),
    "MomentumResidual": Row(lambda: MomentumResidual(0.9)),
    "NoMemory": Row(NoMemory, exact=False),
}
COMMUNICATORS = {
    "AllGather": Row(AllGather),
    "CompressedAllReduce": Row(CompressedAllReduce, agreed=True),
}
