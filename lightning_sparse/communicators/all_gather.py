"""AllGather: every rank receives every rank's entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.communicators.volume import gather_bytes
from lightning_sparse.protocols import Codec, Lost, Mean, Transport
from lightning_sparse.vector import SparseVector


@dataclass(frozen=True)
class AllGather:
    """One all-gather of payloads of equal size; the sum is taken in rank order on every rank, so bits are equal.

    Sent + received per rank: ``2 (w - 1) b`` bytes for ``w`` ranks and payloads of ``b`` bytes; it grows with the
    number of ranks. If any rank's entries are not finite, every rank gets its own entries back.

    Source: Renggli et al., "SparCML", https://arxiv.org/abs/1802.08021, section 5.3 (sparse allgather).

    Example:
        >>> AllGather().nbytes(payload=80, world_size=4)
        480
    """

    agreed: ClassVar[bool] = False

    def sections(self, world_size: int) -> int:
        return 1

    def mean(self, sent: SparseVector, wire: Tensor, codec: Codec, transport: Transport, lost: Lost) -> Mean:
        wires = transport.all_gather(wire[0])  # [w, b] uint8
        parts = [codec.decode(row, sent.numel, sent.capacity) for row in wires.unbind()]
        # one host read for all ranks
        finite = bool(torch.stack([part.values.isfinite().all() for part in parts]).all())
        return Mean(parts, 1.0 / transport.world_size, rejected=None if finite else sent, finite=finite)

    def nbytes(self, payload: int, world_size: int) -> int:
        return gather_bytes(payload, world_size)
