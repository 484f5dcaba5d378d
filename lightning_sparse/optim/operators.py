"""Who computes the norms that layer-wise optimizers need: every rank all of them, or each rank a share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.communicators import ProcessGroup
from lightning_sparse.protocols import Transport

Compute = Callable[[Sequence[int]], Tensor]
"""From positions of layers to one number for each: [positions] float32."""


class Serial:
    """Every rank computes the numbers of all layers.

    Example:
        >>> operator = Serial()
        >>> operator([10, 20], lambda layers: torch.tensor([float(i) for i in layers])), operator.elements
        (tensor([0., 1.]), 30)
    """

    replicated = False
    """Whether all ranks must hold the same weights and gradients."""

    def __init__(self) -> None:
        self.elements = 0

    def __call__(self, numels: Sequence[int], compute: Compute) -> Tensor:
        """One number for each layer: [layers] float32."""
        self.elements += sum(numels)
        return compute(range(len(numels)))


class PTO:
    """Parallel tensor operator: each rank computes the numbers of its share of the layers, and all are gathered.

    Layers are dealt out largest first, each to the rank that has the fewest elements so far. A layer's number is made
    by the same operations from the same bits as on one rank, so the result equals ``Serial``'s bit for bit. It takes
    one all-gather of 4 bytes per layer of the largest share.

    All ranks must hold the same weights, gradients and optimizer state, as with ``ddp`` or ``exchange=Gradients()``;
    every rank calls it. It cannot be used with ``Updates``, whose ranks step on gradients of their own.

    Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021,
    https://arxiv.org/abs/2010.10458.

    Args:
        transport: to the other ranks; None takes a process group of its own when it is first called, if
            torch.distributed is initialised, and is ``Serial`` otherwise.

    Attributes:
        elements: of all layers whose numbers this rank has computed so far.

    Example:
        >>> operator = PTO()
        >>> operator([10, 20], lambda layers: torch.tensor([float(i) for i in layers]))
        tensor([0., 1.])
    """

    replicated = True

    def __init__(self, transport: Transport | None = None) -> None:
        self.elements = 0
        self._transport = transport

    def __call__(self, numels: Sequence[int], compute: Compute) -> Tensor:
        """One number for each layer: [layers] float32. Every rank calls it with the same layers."""
        transport = self._open()
        shares = deal(numels, transport.world_size if transport is not None else 1)
        own = shares[transport.rank] if transport is not None else shares[0]
        self.elements += sum(numels[i] for i in own)
        if transport is None or transport.world_size == 1 or not numels:
            return compute(own)
        width = max(map(len, shares))
        numbers = compute(own)
        row = torch.zeros(width, dtype=torch.float32, device=numbers.device)
        row[: len(own)] = numbers
        gathered = transport.all_gather(row.view(torch.uint8)).flatten().view(torch.float32)  # [w * width]
        place = {layer: rank * width + i for rank, share in enumerate(shares) for i, layer in enumerate(share)}
        return gathered[torch.tensor([place[i] for i in range(len(numels))], device=gathered.device)]

    def close(self) -> None:
        """Give the process group up. The next call makes another."""
        if isinstance(self._transport, ProcessGroup):
            self._transport.close()
            self._transport = None

    def __getstate__(self) -> dict[str, Any]:
        # a process group cannot be copied: the copy makes one of its own
        return {**self.__dict__, "_transport": self._given()}

    def __deepcopy__(self, memo: dict[int, Any]) -> PTO:
        copy = PTO(self._given())
        copy.elements = self.elements
        return copy

    def _given(self) -> Transport | None:
        """The transport, which copies share, unless it is a process group."""
        return None if isinstance(self._transport, ProcessGroup) else self._transport

    def _open(self) -> Transport | None:
        if self._transport is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._transport = ProcessGroup()
        return self._transport


def deal(numels: Sequence[int], world_size: int) -> list[list[int]]:
    """The layers of each rank, in ascending order; no rank has more elements than the mean plus the largest layer.

    >>> deal([5, 1, 4, 4], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for layer in sorted(range(len(numels)), key=lambda i: -numels[i]):
        rank = loads.index(min(loads))
        shares[rank].append(layer)
        loads[rank] += numels[layer]
    return [sorted(share) for share in shares]
