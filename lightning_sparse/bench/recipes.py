"""Recipes that `bench convergence` compares: what is exchanged, by which parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_sparse.codecs import Quantized, Raw
from lightning_sparse.communicators import AllGather, CompressedAllReduce
from lightning_sparse.compressors import SampledTopK, TopK, WeightBlocks
from lightning_sparse.memory import NoMemory, Residual
from lightning_sparse.protocols import Codec, Communicator, Compressor, Memory
from lightning_sparse.sync import Gradients, Updates


@dataclass(frozen=True)
class Recipe:
    """One way to train on several ranks.

    Args:
        exchange: the tap and its options; None averages gradients densely, as DDP does.
        compressor: which entries.
        memory: makes what keeps the rest, for gradients.
        codec: which bytes.
        communicator: how ranks average.
    """

    exchange: Gradients | Updates | None
    compressor: Compressor = field(default_factory=TopK)
    memory: Callable[[], Memory] = Residual
    codec: Codec = field(default_factory=Raw)
    communicator: Communicator = field(default_factory=AllGather)

    @property
    def name(self) -> str:
        """Of the tap: "all_reduce", "gradients" or "updates"."""
        return "all_reduce" if self.exchange is None else self.exchange.name


def _blocks(exchange: Gradients | Updates, bits: int) -> Recipe:
    return Recipe(exchange, WeightBlocks(), codec=Quantized(bits), communicator=CompressedAllReduce())


RECIPES = {
    "dense": Recipe(None),
    "updates": Recipe(Updates()),
    "updates-overlap": Recipe(Updates(overlap=True)),
    "updates-eta1": Recipe(Updates(anchor_step=1.0)),
    "updates-every4": Recipe(Updates(every=4)),
    "updates-every16": Recipe(Updates(every=16)),
    "updates-layer": Recipe(Updates(), TopK(scope="layer")),
    "updates-sampled": Recipe(Updates(), SampledTopK()),
    **{f"blocks-{bits}bit": _blocks(Updates(), bits) for bits in (1, 2, 4)},
    "blocks-1bit-overlap": _blocks(Updates(overlap=True), 1),
    "blocks-1bit-scale1": _blocks(Updates(lr_scale=1), 1),
    "gradients-4bit": _blocks(Gradients(), 4),
    "gradients": Recipe(Gradients()),
    "gradients-layer": Recipe(Gradients(), TopK(scope="layer")),
    "gradients-forgetful": Recipe(Gradients(), memory=NoMemory),
}
