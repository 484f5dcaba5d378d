"""Anchor: the weights that all ranks share, as the memory of the updates exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.accumulator import Difference
from lightning_sparse.memory import Buffers
from lightning_sparse.protocols import Accumulator
from lightning_sparse.vector import SparseVector


class Anchor:
    """Flat float32 copies of the weights, by parameter name; what a rank keeps back is weights - anchor.

    Nothing is stored for it: an entry that is not sent stays in the weights.
    """

    def __init__(self) -> None:
        self.flat: dict[str, Tensor] = {}
        self._lost = Buffers()
        self._outer = Buffers()

    def add(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        """Anchor these weights where they are. Ranks must agree on them."""
        for name, weight in zip(names, weights, strict=True):
            self.flat[name] = weight.to(torch.float32, copy=True)

    def restart(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        """As ``add``, and owe nothing of before."""
        self._lost.clear()
        self._outer.clear()
        self.add(names, weights)

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """The anchor of each name: [n] float32."""
        return [self.flat[name] for name in names]

    def outer(self, names: Sequence[str]) -> list[Tensor]:
        """The outer momentum of each name: [n] float32, zeros at first."""
        return self._outer.of(names, self.of(names))

    def begin(self, inputs: Sequence[Tensor], peak: float) -> None:
        """Nothing depends on the whole."""

    def accumulate(self, names: Sequence[str], inputs: Sequence[Tensor]) -> Accumulator:
        return Difference(inputs, self.of(names))

    def dense(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [weight.float() - anchor for weight, anchor in zip(inputs, self.of(names), strict=True)]

    def discard(self, names: Sequence[str], sent: SparseVector) -> None:
        """The tap takes sent entries out of the weights when it merges the mean."""

    def discard_all(self, names: Sequence[str]) -> None:
        """As ``discard``."""

    def give_back(self, names: Sequence[str], entries: SparseVector) -> None:
        """Nothing has left the weights yet."""

    def lost(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._lost.of(names, inputs)

    def reclaim(self, names: Sequence[str], inputs: Sequence[Tensor], world_size: int) -> None:
        for name, weight in zip(names, inputs, strict=True):
            if name in self._lost:
                # a part of the mean: this rank's progress counts for one in world_size
                weight.add_(self._lost.pop(name), alpha=world_size)

    def undo(self, names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        """The tap takes nothing out of the weights then."""

    def hold(self, names: Sequence[str]) -> None:
        """Nothing to set aside: every weight takes part."""

    def release(self, held: None) -> None:
        """Nothing to put back."""

    def norm(self) -> float:
        """Zero: what is kept back lives in the weights."""
        return 0.0

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"anchor": dict(self.flat), "lost": dict(self._lost), "outer": dict(self._outer)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.flat = {name: buffer.float().clone() for name, buffer in state["anchor"].items()}
        self.load_lost(state["lost"])
        self._outer.load(state["outer"])

    def load_lost(self, state: Mapping[str, Tensor]) -> None:
        """Replace what averaging has rounded away here."""
        self._lost.load(state)
