"""Which gate gradients of an LSTM are kept in its backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GRANULARITIES = ("column", "unit", "element")


@dataclass(frozen=True)
class GateSelection:
    """Keeps the gate gradients of largest magnitude, or those that reach a threshold.

    Args:
        density: fraction kept, in (0, 1], rounded up to whole columns, units or elements; ignored with a threshold.
        threshold: columns and units are kept whose magnitudes, summed over the batch, reach it; elements, if their
            own does. None keeps ``density``.
        granularity: "column" judges each of the 4 H gates over the batch, "unit" the four gates of a hidden unit
            together, "element" each entry: no product gets smaller then.
        chunk: time steps that share one choice, at most, made at the last of them.
    """

    density: float
    threshold: float | None
    granularity: str
    chunk: int

    def columns(self, delta: Tensor) -> tuple[Tensor | None, bool]:
        """Columns to keep, ascending: [k] int64, or None for all of them; elements are left to `mask_`.

        Args:
            delta: gradients of the gates' pre-activations at one time step, [b, 4 h], gates in torch's order.

        Returns:
            The columns, and whether earlier steps may share them: not if nothing is kept, or if one of the gates has no
            gradient at all, as where a loss begins at the cell state, for then nothing is known of its columns.
        """
        if self.granularity == "element" or (self.threshold is None and self.density >= 1):
            return None, True
        scores = torch.linalg.vector_norm(delta, ord=1, dim=0)  # [4 h]
        gates = scores.view(4, -1)  # [4, h]
        alive = (gates != 0).any(1)
        if not bool(alive.any()):
            return scores.new_empty(0, dtype=torch.int64), False
        if self.granularity == "column":
            columns = self._best(scores)
        else:
            starts = torch.arange(0, scores.numel(), gates.shape[1], device=delta.device)
            columns = (starts[:, None] + self._best(gates.sum(0))).flatten()
        return columns, columns.numel() > 0 and bool(alive.all())

    def mask_(self, delta: Tensor) -> None:
        """Zeroes the elements of ``delta`` that are not kept, in place; does nothing for columns and units."""
        if self.granularity != "element":
            return
        magnitudes = delta.abs().flatten()
        if self.threshold is not None:
            delta.masked_fill_((magnitudes < self.threshold).view_as(delta), 0.0)
        elif self.density < 1:
            dropped = magnitudes.numel() - math.ceil(self.density * magnitudes.numel())
            delta.view(-1)[magnitudes.topk(dropped, largest=False, sorted=False).indices] = 0.0

    def _best(self, scores: Tensor) -> Tensor:
        if self.threshold is not None:
            # NaN is kept
            return (~(scores < self.threshold)).nonzero().view(-1)
        kept = math.ceil(self.density * scores.numel())
        return scores.topk(kept, sorted=False).indices.sort().values
