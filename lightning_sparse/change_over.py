"""ChangeOver: the part of the strategy that goes from the exchange to plain DDP and back, as the guard says."""

from __future__ import annotations

from typing import Any

import torch

from lightning_sparse.connection import Connection
from lightning_sparse.graph import is_reentrant
from lightning_sparse.guard import Guard
from lightning_sparse.pace import Pace
from lightning_sparse.sync.gradients import GradientsTap
from lightning_sparse.sync.steps import Steps
from lightning_sparse.sync.updates_tap import UpdatesTap

# DDPStrategy of one tree or the other, which mypy cannot know
_Base: Any = object


class ChangeOver(_Base):
    """Mixed into the strategy, in front of ``DDPStrategy``."""

    model: Any
    _ddp_kwargs: dict[str, Any]
    _connection: Connection | None = None
    _guarded = True
    _pace: Pace | None = None
    # ids of the parameters that DDP looks after; None while the exchange of updates does
    _wrapped: list[int] | None = None
    _is_reentrant: bool | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ``DDPStrategy``; where DDP has taken over, it learns of layers that were unfrozen since."""
        if self._wrapped is not None and self._wrapped != self._trainable():
            self._wrap()
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ``DDPStrategy``; the first one is looked at for what DDP cannot do."""
        if self._pace is not None and self._is_reentrant is None:
            self._is_reentrant = is_reentrant(closure_loss)
        return super().backward(closure_loss, *args, **kwargs)

    def _start_pace(self, steps: Steps, finds_density: bool) -> None:
        """Begin to measure, from the exchange."""
        assert self._connection is not None
        self._connection.tap.resume()
        self._pace = None
        self._unwrap()
        may_leave = self._guarded and (isinstance(self._connection.tap, GradientsTap) or self._is_plain())
        if self.world_size > 1 and (may_leave or finds_density):
            self._pace = self._connection.pace(steps, may_leave)

    def _end_pace(self) -> None:
        self._pace = self._wrapped = self._is_reentrant = None

    def _is_plain(self) -> bool:
        """Whether DDP can take over from the exchange of updates."""
        # each rank's loss scaler follows gradients of its own
        is_scaled = getattr(self.precision_plugin, "scaler", None) is not None
        return bool(self.lightning_module.automatic_optimization) and len(self.optimizers) == 1 and not is_scaled

    def _change_over(self, guard: Guard) -> None:
        """From the exchange to DDP, or back, between two steps."""
        assert self._connection is not None
        tap = self._connection.tap
        is_updates = isinstance(tap, UpdatesTap)
        if not guard.is_dense:
            tap.resume()
            self._unwrap()
        elif is_updates and self._connection.reducer.on_any_rank(bool(self._is_reentrant)):
            guard.refused("activations are checkpointed reentrantly, where DDP cannot look for unused parameters")
        elif reason := tap.rest():
            guard.refused(reason)
        elif is_updates:
            self._wrap()

    def _wrap(self) -> None:
        """DDP takes over from the exchange of updates."""
        self.model, self._wrapped = self.lightning_module, self._trainable()
        # which parameters take part may change from step to step, as it may with the exchange
        asked, self._ddp_kwargs = self._ddp_kwargs, {"find_unused_parameters": True, **self._ddp_kwargs}
        super().configure_ddp()
        self._ddp_kwargs = asked

    def _unwrap(self) -> None:
        if self._wrapped is not None:
            self.model, self._wrapped = self.lightning_module, None

    def _trainable(self) -> list[int]:
        return [id(p) for p in self.lightning_module.parameters() if p.requires_grad]
