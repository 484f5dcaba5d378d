"""VirtualRanks: logical ranks inside one process, to study and test many ranks without any network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from lightning_sparse.communicators.volume import broadcast_bytes, gather_bytes, ring_bytes

_T = TypeVar("_T")


class VirtualRanks:
    """A meeting place for ``world_size`` threads, each of which is a rank with a transport of its own.

    Everything above the transport is what real ranks run: taps, reducer, compressors, codecs, byte counters. Sums are
    taken in rank order; on two ranks that is bit for bit what a real all-reduce gives.

    Args:
        world_size: number of ranks, at least 1.

    Raises:
        ValueError: ``world_size`` below 1.

    Example:
        >>> ranks = VirtualRanks(3)
        >>> means = ranks.run(lambda transport: transport.all_reduce_mean_(torch.full((1,), float(transport.rank))))
        >>> [mean.item() for mean in means]
        [1.0, 1.0, 1.0]
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"VirtualRanks: world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.slots: list[Tensor] = [torch.empty(0)] * world_size
        self.combined = torch.empty(0)
        self.barrier = threading.Barrier(world_size)

    def run(self, task: Callable[[VirtualTransport], _T]) -> list[_T]:
        """Run ``task`` once for every rank, each in a thread of its own; the results in rank order.

        Raises:
            Exception: what a rank raised first; the others are woken up and end.
        """
        first: list[BaseException] = []

        def guarded(rank: int) -> _T | None:
            try:
                return task(VirtualTransport(self, rank))
            except BaseException as error:
                first.append(error)
                # nobody waits for a rank that has failed
                self.barrier.abort()
                return None

        with ThreadPoolExecutor(self.world_size, thread_name_prefix="rank") as pool:
            results = list(pool.map(guarded, range(self.world_size)))
        if first:
            self.barrier.reset()
            raise first[0]
        return results  # type: ignore[return-value]


class VirtualTransport:
    """One rank's transport among ``VirtualRanks``.

    Args:
        ranks: the meeting place.
        rank: in [0, world_size).
    """

    def __init__(self, ranks: VirtualRanks, rank: int) -> None:
        self.rank = rank
        self.world_size = ranks.world_size
        self.bytes = 0
        self._ranks = ranks

    def announce(self, job: str) -> None:
        """Nothing: of use where ranks are compared."""

    def all_gather(self, buffer: Tensor) -> Tensor:
        self.bytes += gather_bytes(buffer.nbytes, self.world_size)
        return self._meet(buffer, torch.stack)

    def all_to_all(self, buffer: Tensor) -> Tensor:
        self.bytes += gather_bytes(buffer.nbytes // self.world_size, self.world_size)
        # every rank takes its own row of what all get
        return self._meet(buffer, torch.stack)[:, self.rank]

    def all_reduce_mean_(self, buffer: Tensor) -> Tensor:
        self.bytes += ring_bytes(buffer.nbytes, self.world_size)
        return buffer.copy_(self._meet(buffer / self.world_size, _sum))

    def broadcast_(self, buffer: Tensor) -> Tensor:
        self.bytes += broadcast_bytes(buffer.nbytes, self.world_size, self.rank)
        return buffer.copy_(self._meet(buffer, lambda slots: slots[0].clone()))

    def close(self) -> None:
        """Nothing to give up."""

    def _meet(self, buffer: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Show ``buffer`` to all ranks, and combine what all show, once for all. Buffers must have one size."""
        ranks = self._ranks
        ranks.slots[self.rank] = buffer
        if ranks.barrier.wait() == 0:
            shapes = {tuple(slot.shape) for slot in ranks.slots}
            if len(shapes) > 1:
                raise ValueError(f"VirtualRanks: expected buffers of one size, got {sorted(shapes)}")
            ranks.combined = combine(ranks.slots)
        # nobody may show the next buffer before this one is read, nor take what is not there yet
        ranks.barrier.wait()
        return ranks.combined


def _sum(slots: list[Tensor]) -> Tensor:
    total = slots[0].clone()
    for slot in slots[1:]:
        total += slot
    return total
