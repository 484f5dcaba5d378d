"""ProcessGroup: a torch.distributed group as a transport that counts its bytes."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

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
        self.calls = 0
        self._timeout = timeout if timeout is not None else default_pg_timeout

    def announce(self, job: str) -> None:
        """Nothing: of use where ranks are compared."""

    def all_gather(self, buffer: Tensor) -> Tensor:
        self.bytes += gather_bytes(buffer.nbytes, self.world_size)
        out = torch.empty(self.world_size * buffer.numel(), dtype=buffer.dtype, device=buffer.device)
        if buffer.numel():
            with self._named("all-gather"):
                _all_gather(out, buffer, group=self._group)
        return out.view(self.world_size, -1) if buffer.numel() else out.view(self.world_size, 0)

    def all_to_all(self, buffer: Tensor) -> Tensor:
        self.bytes += gather_bytes(buffer.nbytes // self.world_size, self.world_size)
        out = torch.empty_like(buffer)
        if buffer.numel():
            with self._named("all-to-all"):
                _all_to_all(out, buffer.contiguous(), group=self._group)
        return out

    def all_reduce_mean_(self, buffer: Tensor) -> Tensor:
        self.bytes += ring_bytes(buffer.nbytes, self.world_size)
        # dividing first keeps half-precision sums of many ranks in range, and is what DDP does
        buffer.div_(self.world_size)
        if buffer.numel():
            with self._named("all-reduce"):
                dist.all_reduce(buffer, group=self._group)
        return buffer

    def broadcast_(self, buffer: Tensor) -> Tensor:
        self.bytes += broadcast_bytes(buffer.nbytes, self.world_size, self.rank)
        if buffer.numel():
            with self._named("broadcast"):
                dist.broadcast(buffer, src=0, group=self._group)
        return buffer

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Say which collective went wrong, and what that means."""
        self.calls += 1
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"sparse_ddp: rank {self.rank} of {self.world_size} got no answer in collective {self.calls} ({what}):"
                f" another rank has ended, or has not come within the timeout of {self._timeout}; its own output says"
                f" why. Reported by torch: {error}"
            ) from error

    def close(self) -> None:
        """Give the group up. The handle is not used again."""
        dist.destroy_process_group(self._group)


def destroy_at_exit() -> None:
    """Give every group up when Python ends: a rank that still holds one then may abort, its work done."""
    atexit.unregister(_destroy)
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
