"""Checked: a transport that compares, before every collective, what each rank is about to do."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparse.protocols import Transport

_ROOM = 256


class Checked:
    """Passes everything on to ``transport``, and raises on every rank once they are about to do different things.

    Without it such ranks hang, abort, or read bytes as what they are not. Costs one small all-gather per collective.

    Args:
        transport: does the work, and counts the bytes, those of the checks included.
        device: where the small messages live.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._job = "start"
        self._calls = 0

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def bytes(self) -> int:
        return self._transport.bytes

    def announce(self, job: str) -> None:
        self._job = job

    def all_gather(self, buffer: Tensor) -> Tensor:
        self._compare("all-gather", buffer)
        return self._transport.all_gather(buffer)

    def all_to_all(self, buffer: Tensor) -> Tensor:
        self._compare("all-to-all", buffer)
        return self._transport.all_to_all(buffer)

    def all_reduce_mean_(self, buffer: Tensor) -> Tensor:
        self._compare("all-reduce", buffer)
        return self._transport.all_reduce_mean_(buffer)

    def broadcast_(self, buffer: Tensor) -> Tensor:
        self._compare("broadcast", buffer)
        return self._transport.broadcast_(buffer)

    def compare_values(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Raise RuntimeError on every rank, naming the first tensor that is not bit-equal on all of them.

        Args:
            tensors: by parameter name; the same names and shapes on every rank.
            step: for the message.
        """
        flat = [x.detach().cpu().contiguous().view(-1) for x in tensors.values()]
        sums = [zlib.crc32(x.view(torch.uint8).numpy().tobytes()) if x.numel() else 0 for x in flat]
        mine = torch.tensor(sums, dtype=torch.int64, device=self._device).view(torch.uint8)
        rows = self._transport.all_gather(mine).view(self.world_size, -1, 8)  # [w, tensors, 8]
        for position, name in enumerate(tensors):
            for rank in range(self.world_size):
                if not torch.equal(rows[rank, position], rows[0, position]):
                    raise RuntimeError(
                        f"sparse_ddp: expected {name!r} to be bit-equal on all ranks after {step} steps, got another"
                        f" value on rank {rank} than on rank 0: it was changed on one rank only"
                    )

    def _compare(self, what: str, buffer: Tensor) -> None:
        self._calls += 1
        text = f"collective {self._calls}, {what} of {buffer.nbytes} bytes ({buffer.dtype}) for {self._job}"
        mine = torch.zeros(_ROOM, dtype=torch.uint8)
        encoded = text.encode()[:_ROOM]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        rows = self._transport.all_gather(mine.to(self._device)).cpu()
        for rank, row in enumerate(rows):
            if not torch.equal(row, rows[0]):
                first, other = (bytes(x.tolist()).rstrip(b"\0").decode() for x in (rows[0], row))
                raise RuntimeError(
                    f"sparse_ddp: expected every rank to do the same, got {first} on rank 0, and {other} on rank"
                    f" {rank}: they have taken different ways through the training loop"
                )
