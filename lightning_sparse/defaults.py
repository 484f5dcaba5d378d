"""Defaults: what the strategy takes where nothing was asked for. They follow the README's tables of losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_sparse.codecs import Quantized, Raw
from lightning_sparse.communicators import AllGather, CompressedAllReduce
from lightning_sparse.compressors import TopK, WeightBlocks
from lightning_sparse.ladder import Rung, make_rungs
from lightning_sparse.protocols import Codec, Communicator, Compressor, Memory, Schedule
from lightning_sparse.sync import Gradients, Updates


@dataclass(frozen=True)
class Parts:
    """The parts that a reducer is made of."""

    density: float | Schedule
    compressor: Compressor
    codec: Codec
    communicator: Communicator
    rungs: tuple[Rung, ...] = ()
    """What the density "auto" may choose; the one it begins with is ``density`` and ``codec``."""

    def __str__(self) -> str:
        density = "a schedule" if callable(self.density) else "auto" if self.rungs else self.density
        return f"density {density}, {self.compressor}, {self.codec}, {self.communicator}"


def choose_exchange(exchange: Any, memory: Memory | None) -> Gradients | Updates:
    """What "auto" stands for: a memory is of use with gradients only."""
    if isinstance(exchange, (Gradients, Updates)):
        return exchange
    return Gradients() if memory is not None else Updates()


def choose_parts(
    exchange: Gradients | Updates,
    density: float | Schedule | str | None,
    compressor: Compressor | None,
    codec: Codec | None,
    communicator: Communicator | None,
) -> Parts:
    """Fill in what is None.

    Raises:
        ValueError: a codec or a communicator needs entries that ranks agree on, and the compressor picks others.
    """
    needs = [x for x in (codec, communicator) if x is not None and x.agreed]
    if compressor is None:
        # a density alone means what it means in the literature: a share of entries that each rank picks
        is_default = isinstance(exchange, Updates) and (density in (None, "auto") or density == 1)
        compressor = WeightBlocks() if is_default or needs else TopK()
    if needs and not compressor.agreed:
        raise ValueError(
            f"SparseDDPStrategy: {needs[0]} needs entries that are the same on every rank, got {compressor}:"
            " use compressor=WeightBlocks()"
        )
    rungs: list[Rung] = []
    if density == "auto":
        rungs, begin = make_rungs(compressor, Raw() if codec is None and not compressor.agreed else codec)
        density, codec = rungs[begin].density, rungs[begin].codec
    assert not isinstance(density, str)
    if density is None:
        density = 0.25 if compressor.agreed else 0.01
    if codec is None:
        # density 1 is a plain dense all-reduce, whatever carries the rest
        codec = Quantized(1) if compressor.agreed and density != 1 else Raw()
    if communicator is None:
        communicator = CompressedAllReduce() if compressor.agreed else AllGather()
    return Parts(density, compressor, codec, communicator, tuple(rungs))
