"""What an exchange has cost so far, as one flat report."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_sparse.communicators.volume import ring_bytes
from lightning_sparse.protocols import Tap
from lightning_sparse.reducer import Reducer


def summarise(tap: Tap, reducer: Reducer, module: nn.Module, skipped: int) -> dict[str, Any]:
    """The keys that ``SparseDDPStrategy.summary`` documents."""
    totals, steps = reducer.snapshot()[0], max(1, tap.steps)
    transport = reducer.transport
    parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return {
        "exchange": tap.name,
        "world_size": transport.world_size,
        "density": totals.entries / max(1, totals.numel),
        "steps": tap.steps,
        "bytes_per_step": (transport.bytes + ring_bytes(tap.beside, transport.world_size)) / steps,
        "dense_bytes_per_step": ring_bytes(4 * parameters, transport.world_size),
        "skipped": skipped,
        "seconds": {stage: seconds / steps for stage, seconds in totals.seconds.items()},
    }
