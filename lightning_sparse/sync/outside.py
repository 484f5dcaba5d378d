"""Outside: parameters that no optimizer steps but something else may change, such as a teacher's weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_sparse.protocols import Transport
from lightning_sparse.sync.buffers import average

Named = tuple[str, nn.Parameter]


class Outside:
    """Averages over ranks those parameters that have changed on any rank; the others cost nothing but a look.

    Args:
        parameters: equal on all ranks now.
    """

    def __init__(self, parameters: Iterable[Named]) -> None:
        self._seen = {name: _fingerprint(parameter) for name, parameter in parameters}

    def share(self, parameters: Iterable[Named], transport: Transport) -> None:
        """Look for changes since the last call, in place. Every rank calls it with the same parameters."""
        outside = list(parameters)
        if not outside:
            return
        moved = torch.tensor([float(_fingerprint(p) != self._seen[name]) for name, p in outside])  # [p]
        flags = transport.all_reduce_mean_(moved.to(outside[0][1].device)).tolist()
        changed = [(name, p) for (name, p), flag in zip(outside, flags, strict=True) if flag]
        average([p.detach() for _, p in changed], transport)
        self._seen.update({name: _fingerprint(p) for name, p in changed})


def _fingerprint(tensor: torch.Tensor) -> float:
    """A number that changes when the values do, with next to certainty. Reads the tensor once."""
    x = tensor.detach().double()
    return float(x.square().sum() + x.sum())
