"""UpdatesTap: takes progress after optimizer steps, merges what comes back, and shows the anchor where it counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.finite import gradients_are_finite
from lightning_sparse.job import Job
from lightning_sparse.protocols import Owed
from lightning_sparse.reducer import Reducer
from lightning_sparse.sync import saved
from lightning_sparse.sync.buffers import share_buffers
from lightning_sparse.sync.factors import factors
from lightning_sparse.sync.flat import is_small
from lightning_sparse.sync.group import Group
from lightning_sparse.sync.merge import merge
from lightning_sparse.sync.outside import Outside
from lightning_sparse.sync.resting import Resting, rescale
from lightning_sparse.sync.shown import Shown, settle
from lightning_sparse.sync.updates import Updates

log = logging.getLogger(__name__)


class UpdatesTap:
    """The anchor form of the exchange, one group for each optimizer.

    Args:
        config: the options.
        reducer: does the work.
        module: whose weights are trained, equal on all ranks now.
        optimizers: in the same order on every rank.
        is_linear: whether an optimizer is linear in the gradient, for the default anchor step.
    """

    name = "updates"

    def __init__(
        self,
        config: Updates,
        reducer: Reducer,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        is_linear: Callable[[Optimizer], bool],
    ) -> None:
        self.watch: Callable[[int], bool] = lambda step: False
        self.is_observed = False
        """Whether somebody looks at the gradients before a step, and expects this rank's own."""
        self.beside = 0
        """Bytes of float32 gradients that DDP has averaged, behind the reducer's back."""
        self._config = config
        self._reducer = reducer
        self._module = module
        self._groups: dict[int, Group] = {}
        self._optimizers = list(optimizers)
        if config.outer_momentum and not reducer.compressor.agreed:
            raise ValueError(
                f"Updates: outer_momentum needs entries that are the same on every rank, got {reducer.compressor}:"
                " use compressor=WeightBlocks(), at density=1 too"
            )
        default = 0 if reducer.compressor.agreed else 1024
        self._dense_below = config.dense_below if config.dense_below is not None else default
        self._before: list[Tensor] | None = None
        self._unowned = {id(p): (n, p) for n, p in module.named_parameters() if p.numel()}
        for position, optimizer in enumerate(optimizers):
            name = f"optimizer {position}"
            group = Group(name, *factors(config, name, reducer, is_linear(optimizer)))
            self._groups[id(optimizer)] = group
            self._adopt(group, optimizer)
        self._outside = Outside(self._unowned.values())
        self._shown = Shown(self._groups, self._merge, self._share_rest)
        self._resting: Resting | None = None
        self._given_up = ""

    @property
    def steps(self) -> int:
        """Steps of the first optimizer."""
        return next((group.steps for group in self._groups.values()), 0)

    def lr_scales(self) -> dict[str, float]:
        """The factor on the next step, by parameter name."""
        return {name: scale for group in self._groups.values() for name, scale in group.lr_scales().items()}

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, announced: bool = False) -> None:
        group = self._group(optimizer)
        self._adopt(group, optimizer)
        self._before = None
        if self._resting is not None:
            self._resting.before_step(group)
            return
        if self.watch(group.steps):
            self._before = [view.clone() for view in group.views(group.parameters)]
        group.before_step(optimizer if announced else None)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        group = self._group(optimizer)
        if self._resting is not None:
            group.steps += 1
            self.beside += sum(4 * p.numel() for p in group.parameters.values() if p.requires_grad)
            return
        group.after_step()
        before, self._before = self._before, None
        if before is not None:
            moved = zip(group.views(group.parameters), before, strict=True)
            group.moved = math.sqrt(sum(float((p - old).double().square().sum()) for p, old in moved))
        group.steps += 1
        if group.steps % self._config.every:
            return
        self._merge(group)
        small = {name for name, p in group.parameters.items() if is_small(p, self._dense_below)}
        live = group.live()
        sparse, dense = [n for n in live if n not in small], [n for n in live if n in small]
        inputs, dense_inputs = group.views(sparse), group.views(dense)
        # blocks carry NaN in their turn, where a selection would pass over it for ever
        is_safe = self._reducer.compressor.agreed
        job = Job(group.name, group.exchanges, group.anchor, sparse, inputs, dense, dense_inputs, is_safe=is_safe)
        group.exchanges += 1
        # picked here and not on the worker: the next step changes the weights
        group.flight = self._reducer.submit_picked(self._reducer.pick(job))
        if not self._config.overlap:
            self._merge(group)

    def end_step(self, optimizer: Optimizer) -> None:
        self._group(optimizer).end_step(optimizer)

    def refuses(self, optimizer: Optimizer) -> bool:
        return not gradients_are_finite(optimizer)

    @torch.no_grad()
    def give_up(self, message: str) -> None:
        """Weights that are not finite end the next exchange on every rank; the anchor stays as it is."""
        if self._resting is not None:
            # every rank has seen the same mean
            raise FloatingPointError(message)
        log.error(message)
        self._given_up = message
        for group in self._groups.values():
            for view in group.views(group.live()):
                view.fill_(torch.nan)

    def check(self) -> None:
        """Nothing: errors are raised where an exchange is waited for."""

    def rest(self) -> str:
        if self.is_observed:
            return "somebody looks at this rank's own gradients"
        for group in self._groups.values():
            self._merge(group)
        resting = Resting(self._groups, self._optimizers, self._reducer)
        if not resting.begin():
            return "ranks keep optimizer states that no mean exists of"
        self._resting = resting
        return ""

    def resume(self) -> None:
        if self._resting is not None:
            self._resting.end()
        self._resting = None

    @torch.no_grad()
    def restart(self) -> None:
        for group in self._groups.values():
            if group.flight is not None:
                group.flight.result()
            group.restart()
        self._shown.restart()

    def enter_shared(self) -> None:
        self._check_given_up()
        self._shown.enter(together=True)

    def leave_shared(self) -> None:
        self._shown.leave()

    @contextmanager
    def shared(self, together: bool) -> Iterator[None]:
        """The module shows the anchor inside the block.

        Args:
            together: every rank enters it, so buffers can be shared and exchanges waited for.
        """
        if self._shown.is_shown:
            yield
            return
        if together:
            self._check_given_up()
        self._shown.enter(together)
        try:
            yield
        finally:
            self._shown.leave()

    def finish(self) -> None:
        self._check_given_up()
        # a copy, so that weights that callbacks replace from here on are noticed
        self.resume()
        self._shown.end(together=True)

    def settle(self) -> None:
        """After everybody's last hook: weights that a callback replaced since ``finish`` are averaged over ranks.

        Every rank calls it.
        """
        settle(self._groups.values(), self._reducer)

    def abandon(self) -> None:
        """Training ended early: the module keeps the anchor, and nobody is waited for."""
        self._shown.end(together=False)

    @torch.no_grad()
    def shared_state(self, together: bool = True) -> dict[str, Any]:
        for group in self._groups.values() if together else ():
            self._merge(group)
        groups = [group.shared_state(together) for group in self._groups.values()]
        return {"groups": groups, "at_rest": self._resting is not None}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        groups = state["groups"]
        if len(groups) != len(self._groups):
            raise ValueError(
                f"Updates: expected a checkpoint of {len(self._groups)} optimizers, got one of {len(groups)}:"
                " it belongs to another model"
            )
        for optimizer, group, part in zip(self._optimizers, self._groups.values(), groups, strict=True):
            # a callback may have brought parameters back before
            self._adopt(group, optimizer)
            group.load_shared_state(part)
        if state["at_rest"]:
            # moments that were saved while DDP was in charge are this exchange's again
            rescale(self._groups.values(), self._optimizers, 2)

    def own_state(self) -> dict[str, dict[str, Tensor]]:
        return saved.own_state(self._groups.values())

    def load_own_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        saved.load_own_state(self._groups.values(), state)

    def owed(self, world_size: int) -> Owed:
        return saved.owed(self._groups.values(), world_size)

    def load_owed(self, owed: Mapping[str, Mapping[str, Tensor]]) -> None:
        saved.load_owed(self._groups.values(), owed)

    def equal(self) -> dict[str, Tensor]:
        return {name: x for group in self._groups.values() for name, x in group.anchor.flat.items()}

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        squares = 0.0
        for group in self._groups.values():
            for view, anchor in group.pairs():
                squares += float((view.float() - anchor).double().square().sum())
        return {"left": math.sqrt(squares), "input": math.hypot(*(group.moved for group in self._groups.values()))}

    def _adopt(self, group: Group, optimizer: Optimizer) -> None:
        """Take up parameters that the optimizer has got since; they have not been trained, so ranks agree on them."""
        count = sum(len(entry["params"]) for entry in optimizer.param_groups)
        if count == group.known:
            return
        group.known = count
        mine = [id(p) for entry in optimizer.param_groups for p in entry["params"]]
        # a parameter of two optimizers belongs to the first
        group.add(dict(self._unowned.pop(key) for key in mine if key in self._unowned))

    def _check_given_up(self) -> None:
        """Raise FloatingPointError if a rank has given up since the last exchange. Every rank calls it."""
        # an exchange tells all of them
        waits = any(group.steps % self._config.every for group in self._groups.values())
        if waits and self._reducer.on_any_rank(bool(self._given_up)):
            raise FloatingPointError(
                self._given_up
                or "sparse_ddp: expected finite gradients on every rank, got NaN or inf on another one, whose own"
                " message says more: lower the learning rate, or pass on_nonfinite='skip'"
            )

    def _share_rest(self) -> None:
        def share() -> None:
            share_buffers(self._module, self._reducer.transport)
            self._outside.share(self._unowned.values(), self._reducer.transport)

        self._reducer.call(share)

    def _group(self, optimizer: Optimizer) -> Group:
        if id(optimizer) not in self._groups:
            raise RuntimeError(
                f"Updates: expected one of the {len(self._groups)} optimizers that fit began with, got another"
                f" {type(optimizer).__name__}: add parameters to an optimizer with add_param_group"
            )
        return self._groups[id(optimizer)]

    @torch.no_grad()
    def _merge(self, group: Group) -> None:
        """Wait for the exchange in flight and add its mean to the anchor and to this rank's weights."""
        if group.flight is None:
            return
        outcome, group.flight = group.flight.result(), None
        # kept until the next one: the worker's stream may not take its memory while ours still reads it
        group.merged = outcome
        if not outcome.finite:
            raise FloatingPointError(
                f"Updates: expected finite weights on every rank, got NaN or inf on at least one after"
                f" {group.steps} steps ({group.name}); the anchor is untouched: lower the learning rate or clip"
            )
        merge(group, outcome, self._config, self._reducer.communicator.agreed)
