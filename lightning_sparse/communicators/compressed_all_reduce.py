"""CompressedAllReduce: every rank averages one section of a block that all agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.block import Block, as_block
from lightning_sparse.communicators.volume import gather_bytes
from lightning_sparse.finite import are_finite
from lightning_sparse.protocols import Codec, Lost, Mean, Transport
from lightning_sparse.vector import SparseVector


@dataclass(frozen=True)
class CompressedAllReduce:
    """An all-to-all and an all-gather of encoded sections: bytes grow with ranks no more than a ring all-reduce's.

    Payloads are cut into one section a rank. Rank r decodes section r of every rank, sums in rank order, encodes the
    mean again and sends it to all. What this second encoding rounds away joins the next mean of these entries on this
    rank: one more float32 buffer, in the memory, which owes it again where a change of density moves the sections.
    Needs entries that are the same on every rank (``WeightBlocks``). Sent + received per rank: ``4 (w - 1) s`` bytes,
    ``s`` of a section. If any rank's entries are not finite, every rank gets its own entries back.

    Source: Tang et al., "1-bit Adam", https://arxiv.org/abs/2102.02888, section 6.1 (compressed allreduce).

    Example:
        >>> CompressedAllReduce().nbytes(payload=80, world_size=4)
        240
    """

    agreed: ClassVar[bool] = True

    def sections(self, world_size: int) -> int:
        return world_size

    def mean(self, sent: SparseVector, wire: Tensor, codec: Codec, transport: Transport, lost: Lost) -> Mean:
        world, capacity = transport.world_size, sent.capacity // transport.world_size
        mine, kept = as_block(sent).sections(world)[transport.rank], lost()
        # what this rank sends itself was decoded before
        rows = [
            mine if rank == transport.rank else codec.decode(row, sent.numel, capacity)
            for rank, row in enumerate(transport.all_to_all(wire).unbind())
        ]
        total = rows[0].values.clone()
        for row in rows[1:]:
            total += row.values
        # NaN first: a rank that has some cannot say where its block is
        if not total.is_cuda and are_finite([total]):
            _check_agreed(rows)
        # what was rounded away when these entries were here last
        own = total.div_(world).add_(mine.read(kept))
        reply = codec.encode(mine.with_values(own))
        parts = [codec.decode(row, sent.numel, capacity) for row in transport.all_gather(reply).unbind()]
        if not are_finite([part.values for part in parts]):
            return Mean(parts, 1.0, rejected=sent, finite=False)
        mine.with_values(own - parts[transport.rank].values).write_to(kept)
        return Mean(parts, 1.0)

    def nbytes(self, payload: int, world_size: int) -> int:
        section = payload // world_size
        return gather_bytes(section, world_size) * 2


def _check_agreed(rows: list[SparseVector]) -> None:
    for rank, row in enumerate(rows):
        if not _same_entries(row, rows[0]):
            raise ValueError(
                f"CompressedAllReduce: expected the same entries from every rank, got others from rank {rank} than from"
                " rank 0: use it with WeightBlocks()"
            )


def _same_entries(a: SparseVector, b: SparseVector) -> bool:
    if isinstance(a, Block) and isinstance(b, Block):
        return (a.start, a.count) == (b.start, b.count)
    return torch.equal(a.indices, b.indices)
