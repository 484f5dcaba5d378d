"""Connection: the tap of one run, its reducer, and the process group they use."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_sparse.arguments import is_linear
from lightning_sparse.codecs import Raw
from lightning_sparse.communicators import Checked, ProcessGroup
from lightning_sparse.defaults import Parts
from lightning_sparse.guard import Guard
from lightning_sparse.ladder import Ladder
from lightning_sparse.link import all_reduce_seconds
from lightning_sparse.memory import Residual
from lightning_sparse.pace import Pace
from lightning_sparse.protocols import Memory
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant
from lightning_sparse.sync import Gradients, Updates
from lightning_sparse.sync.buffers import broadcast_state
from lightning_sparse.sync.gradients import GradientsTap
from lightning_sparse.sync.steps import Steps
from lightning_sparse.sync.updates_tap import UpdatesTap

_COMPARE_EVERY = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a strategy was asked for, the same on every rank."""

    exchange: Gradients | Updates
    parts: Parts
    memory: Memory | None
    seed: int
    debug: bool

    def __str__(self) -> str:
        return f"{self.exchange}, {self.parts}, seed {self.seed}" + (", debug" if self.debug else "")


class Connection:
    """Connects a module and its optimizers to the other ranks. Every rank makes one, at the same time.

    Args:
        plan: the algorithm.
        module: is trained, and equal on all ranks behind this.
        optimizers: of the module, in the same order on every rank.
        device: where the module lives.
        timeout: of every collective.
        backend: of the process group.
        find_unused: as DDP's ``find_unused_parameters``.
        loss_scale: the factor that is on the gradients now.
    """

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        timeout: timedelta | None,
        backend: str | None,
        find_unused: bool,
        loss_scale: Callable[[], float],
    ) -> None:
        self._plan, self._module = plan, module
        self._transport = ProcessGroup(timeout, backend)
        self._checked = Checked(self._transport, device) if plan.debug else None
        # one rank rounds and delays nothing, but a memory's momentum is its own, and it takes over what others owed
        alone = self._transport.world_size == 1
        parts = replace(plan.parts, density=1.0, codec=Raw()) if alone else plan.parts
        density = parts.density if callable(parts.density) else constant(float(parts.density))
        algorithm = (parts.compressor, parts.codec, parts.communicator)
        self.reducer = Reducer(*algorithm, self._checked or self._transport, density, device, plan.seed)
        self.tap: GradientsTap | UpdatesTap
        try:
            if isinstance(plan.exchange, Gradients):
                # a copy: every fit starts with an empty memory
                memory = copy.deepcopy(plan.memory) if plan.memory is not None else Residual()
                self.tap = GradientsTap(plan.exchange, self.reducer, memory, module, find_unused, loss_scale)
            else:
                broadcast_state(module, self._transport)
                self.tap = UpdatesTap(plan.exchange, self.reducer, module, optimizers, is_linear)
        except BaseException:
            self.close()
            raise

    def compare_ranks(self) -> None:
        """In debug mode, now and then: raise RuntimeError unless ranks agree where they must. Every rank calls it."""
        checked, tap = self._checked, self.tap
        if checked is not None and tap.steps % _COMPARE_EVERY == 0:
            self.reducer.call(lambda: checked.compare_values(tap.equal(), tap.steps))

    def pace(self, steps: Steps, may_leave: bool) -> Pace:
        """Times steps, finds a density if asked to, and says when plain DDP is faster, if it may be left for that."""
        numel = sum(p.numel() for p in self._module.parameters() if p.requires_grad)
        exchange, is_first = self._plan.exchange, self._transport.rank == 0
        guard = Guard(
            exchange.every if isinstance(exchange, Updates) else 1,
            lambda: all_reduce_seconds(self.reducer, numel),
            self.reducer.agree,
            lambda text: log.info(f"sparse_ddp: {text}") if is_first else None,
            self._ladder(numel) if self._plan.parts.rungs else None,
            may_leave,
        )
        return Pace(guard, self.reducer, steps)

    def _ladder(self, numel: int) -> Ladder:
        parts, exchange = self._plan.parts, self._plan.exchange
        begin = next(i for i, x in enumerate(parts.rungs) if (x.density, x.codec) == (parts.density, parts.codec))
        # a selection over the whole model waits for the last gradient
        hides = exchange.overlap if isinstance(exchange, Updates) else parts.compressor.scope != "model"
        return Ladder(
            parts.rungs,
            begin,
            parts.compressor,
            parts.communicator,
            numel,
            self._transport.world_size,
            hides,
            lambda rung: self.reducer.use(constant(rung.density), rung.codec),
        )

    def close(self) -> None:
        """Stop the worker and give the process group up."""
        # a group in use cannot be given up
        if self.reducer.close():
            self._transport.close()
