"""Group: what the updates exchange knows of one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from torch import Tensor, nn

from lightning_sparse.job import Outcome
from lightning_sparse.protocols import Schedule
from lightning_sparse.sync.agreement import Agreement
from lightning_sparse.sync.anchor import Anchor
from lightning_sparse.sync.flat import flat_view


class Group:
    """The parameters of one optimizer, their anchor, and the exchange in flight.

    Args:
        name: of the stream of exchanges.
        eta: schedule of the anchor step over exchanges.
        lr_scale: schedule of the factor on learning rates over steps, or what measures it.
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

    def add(self, parameters: dict[str, nn.Parameter]) -> None:
        """Take up parameters that ranks agree on now."""
        self.parameters.update(parameters)
        self.anchor.add(list(parameters), self.views(parameters))

    def live(self) -> list[str]:
        """Names of what has ever been trainable: frozen weights must not move."""
        self._trained.update(name for name, p in self.parameters.items() if p.requires_grad)
        return [name for name in self.parameters if name in self._trained]

    def rate(self) -> Callable[[Tensor], float]:
        """The factor on the learning rate of each parameter, for the coming step."""
        if isinstance(scale := self.lr_scale, Agreement):
            names = {id(p): name for name, p in self.parameters.items()}
            return lambda p: scale.factor(names[id(p)]) if id(p) in names else 1.0
        same = float(scale(self.steps))
        return lambda p: same

    def restart(self) -> None:
        """Anchor the weights where they are and count from the start."""
        if isinstance(self.lr_scale, Agreement):
            self.lr_scale.restart()
        self.steps = self.exchanges = 0
        self.flight = self.merged = None
        self.anchor.restart(list(self.parameters), self.views(self.parameters))

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
