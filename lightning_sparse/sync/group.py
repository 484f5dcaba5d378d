"""Group: what the updates exchange knows of one optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.job import Outcome
from lightning_sparse.protocols import Schedule
from lightning_sparse.sync.agreement import Agreement
from lightning_sparse.sync.anchor import Anchor
from lightning_sparse.sync.flat import flat_view
from lightning_sparse.sync.lent_rates import LentRates
from lightning_sparse.sync.stretch import Stretch


class Group:
    """The parameters of one optimizer, their anchor, and the exchange in flight.

    Args:
        name: of the stream of exchanges.
        eta: schedule of the anchor step over exchanges.
        lr_scale: schedule of the factor on the optimizer's steps, or what measures it.
    """

    def __init__(self, name: str, eta: Schedule, lr_scale: Schedule | Agreement) -> None:
        self.name = name
        self.steps = 0
        self.exchanges = 0
        self.eta = eta
        self.lr_scale = lr_scale
        self.known = 0
        self._trained: set[str] = set()
        self.parameters: dict[str, nn.Parameter] = {}
        self.anchor = Anchor()
        self.flight: Future[Outcome] | None = None
        self.merged: Outcome | None = None
        self.own: list[Tensor] = []
        self.moved = 0.0
        self._stretch = Stretch()
        self._rates = LentRates()

    def add(self, parameters: dict[str, nn.Parameter]) -> None:
        """Take up parameters that ranks agree on now."""
        self.parameters.update(parameters)
        self.anchor.add(list(parameters), self.views(parameters))

    def live(self) -> list[str]:
        """Names of what has ever been trainable: frozen weights must not move."""
        self._trained.update(name for name, p in self.parameters.items() if p.requires_grad)
        return [name for name in self.parameters if name in self._trained]

    def lr_scales(self) -> dict[str, float]:
        """The factor on the coming step, by parameter name."""
        if isinstance(scale := self.lr_scale, Agreement):
            return {name: scale.factor(name) for name in self.parameters}
        return dict.fromkeys(self.parameters, float(scale(self.steps)))

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Remember what is needed to measure and to stretch the coming step.

        Args:
            optimizer: may be given other rates for the step, as ``end_step`` follows.
        """
        weights = self.by_name()
        if isinstance(self.lr_scale, Agreement):
            self.lr_scale.before_step(self.steps, weights)
        scales = self.lr_scales()
        factors = {name: scales[name] for name in weights if scales[name] != 1}
        by_rate = optimizer is not None and self._rates.arm(optimizer, self.parameters, factors)
        self._stretch.before_step(weights, {} if by_rate else factors)

    def end_step(self, optimizer: Optimizer) -> None:
        """Behind a step that may have raised: the optimizer has its own rates again."""
        self._rates.disarm(optimizer)

    def after_step(self) -> None:
        """Measure the step, then stretch it."""
        weights = self.by_name()
        if isinstance(self.lr_scale, Agreement):
            self.lr_scale.after_step(weights, self._rates.applied)
        self._stretch.after_step(weights)

    def restart(self) -> None:
        """Anchor the weights where they are and count from the start."""
        if isinstance(self.lr_scale, Agreement):
            self.lr_scale.restart()
        self.steps = self.exchanges = 0
        self.flight = self.merged = None
        self.anchor_here()

    def alias(self) -> None:
        """The weights are the anchor, with nothing copied; half-precision ones in their own type."""
        self.anchor.flat = dict(zip(self.parameters, self.views(self.parameters), strict=True))

    def rest(self) -> None:
        """The weights are the anchor, and nothing else is kept, until ``anchor_here``."""
        self.anchor.restart([], [])
        self.merged = None
        self._stretch = Stretch()
        self.alias()

    def anchor_here(self) -> None:
        """Anchor the weights where they are; ranks must agree on them."""
        self.anchor.restart(list(self.parameters), self.views(self.parameters))

    def shared_state(self, together: bool = True) -> dict[str, Any]:
        """What is equal on all ranks: counters, what was measured, the anchor where weights are no copy of it."""
        state = self.anchor.state_dict()
        rounded = {name for name, p in self.parameters.items() if p.dtype is not torch.float32}
        measured = self.lr_scale.state_dict(together) if isinstance(self.lr_scale, Agreement) else None
        return {
            "steps": self.steps,
            "exchanges": self.exchanges,
            "trained": sorted(self._trained),
            "agreement": measured,
            "anchor": {name: x for name, x in state["anchor"].items() if name in rounded},
            "outer": state["outer"],
        }

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``shared_state`` gave; other weights are where the anchor is."""
        self.steps, self.exchanges = int(state["steps"]), int(state["exchanges"])
        if min(self.steps, self.exchanges) < 0:
            raise ValueError(f"Updates: expected counters from 0, got {self.steps} steps, {self.exchanges} exchanges")
        self._trained = set(state["trained"])
        if isinstance(self.lr_scale, Agreement) and state["agreement"] is not None:
            self.lr_scale.load_state_dict(state["agreement"])
        self.anchor.load_state_dict({"anchor": self.anchor.flat | state["anchor"], "outer": state["outer"], "lost": {}})

    def own_state(self) -> dict[str, dict[str, Tensor]]:
        """This rank's weights, and what averaging has rounded away here."""
        return {
            "weights": dict(zip(self.parameters, self._own(), strict=True)),
            "lost": self.anchor.state_dict()["lost"],
        }

    def owed(self) -> dict[str, Tensor]:
        """Weights - anchor, by name: [n] float32."""
        anchors = self.anchor.of(list(self.parameters))
        return {name: p.float() - x for name, p, x in zip(self.parameters, self._own(), anchors, strict=True)}

    def _own(self) -> list[Tensor]:
        # set aside while the module shows the anchor
        return self.own or self.views(self.parameters)

    def by_name(self) -> dict[str, Tensor]:
        """Every trainable weight as a flat view: [n] each."""
        live = self.live()
        return dict(zip(live, self.views(live), strict=True))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every weight as a flat view, and its anchor: [n] each."""
        return list(zip(self.views(self.parameters), self.anchor.of(list(self.parameters)), strict=True))

    def views(self, names: Iterable[str]) -> list[Tensor]:
        """The weights as flat views: [n] each."""
        # taken anew each time: the storage of a parameter may change between steps
        return [flat_view(self.parameters[name]) for name in names]
