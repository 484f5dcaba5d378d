"""ProcessGroup: a torch.distributed group as a transport that counts its bytes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.communicators.volume import broadcast_bytes, gather_bytes, ring_bytes

# renamed in torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_to_all = dist.all_to_all_single


class ProcessGroup:
    """A process group of its own, so that its collectives never interleave with those of the training loop.

    Every rank must construct it, in the same order.

    Args:
        timeout: how long a collective may wait for a rank; None takes torch's default.
        backend: as for ``torch.distributed.new_group``; None takes the default group's.
    """

    def __init__(self, timeout: timedelta | None = None, backend: str | None = None) -> None:
        self._group = dist.new_group(timeout=timeout, backend=backend)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.bytes = 0

    def all_gather(self, buffer: Tensor) -> Tensor:
        self.bytes += gather_bytes(buffer.nbytes, self.world_size)
        out = torch.empty(self.world_size * buffer.numel(), dtype=buffer.dtype, device=buffer.device)
        if buffer.numel():
            _all_gather(out, buffer, group=self._group)
        return out.view(self.world_size, -1) if buffer.numel() else out.view(self.world_size, 0)

    def all_to_all(self, buffer: Tensor) -> Tensor:
        self.bytes += gather_bytes(buffer.nbytes // self.world_size, self.world_size)
        out = torch.empty_like(buffer)
        if buffer.numel():
            _all_to_all(out, buffer.contiguous(), group=self._group)
        return out

    def all_reduce_mean_(self, buffer: Tensor) -> Tensor:
        self.bytes += ring_bytes(buffer.nbytes, self.world_size)
        # dividing first keeps half-precision sums of many ranks in range, and is what DDP does
        buffer.div_(self.world_size)
        if buffer.numel():
            dist.all_reduce(buffer, group=self._group)
        return buffer

    def broadcast_(self, buffer: Tensor) -> Tensor:
        self.bytes += broadcast_bytes(buffer.nbytes, self.world_size, self.rank)
        if buffer.numel():
            dist.broadcast(buffer, src=0, group=self._group)
        return buffer

    def close(self) -> None:
        """Give the group up. The handle is not used again."""
        dist.destroy_process_group(self._group)
