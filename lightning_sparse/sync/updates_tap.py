"""UpdatesTap: takes progress after optimizer steps, merges what comes back, and shows the anchor where it counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.job import Job
from lightning_sparse.protocols import Schedule
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant
from lightning_sparse.sync.agreement import Agreement
from lightning_sparse.sync.buffers import average, share_buffers
from lightning_sparse.sync.flat import is_small
from lightning_sparse.sync.group import Group
from lightning_sparse.sync.merge import merge
from lightning_sparse.sync.outside import Outside
from lightning_sparse.sync.rates import Rates, check_rates
from lightning_sparse.sync.updates import Updates


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
        self._config = config
        self._reducer = reducer
        self._module = module
        self._groups: dict[int, Group] = {}
        if config.outer_momentum and not reducer.compressor.agreed:
            raise ValueError(
                f"Updates: outer_momentum needs entries that are the same on every rank, got {reducer.compressor}:"
                " use compressor=WeightBlocks() or density=1"
            )
        default = 0 if reducer.compressor.agreed else 1024
        self._dense_below = config.dense_below if config.dense_below is not None else default
        self._shared = False
        self._finished = False
        self._before: list[Tensor] | None = None
        self._rates = Rates()
        self._unowned = {id(p): (n, p) for n, p in module.named_parameters() if p.numel()}
        for position, optimizer in enumerate(optimizers):
            name = f"optimizer {position}"
            group = Group(name, *self._factors(name, is_linear(optimizer)))
            if isinstance(group.lr_scale, Agreement):
                check_rates(optimizer)
            self._groups[id(optimizer)] = group
            self._adopt(group, optimizer)
        self._outside = Outside(self._unowned.values())

    @property
    def steps(self) -> int:
        """Steps of the first optimizer."""
        return next((group.steps for group in self._groups.values()), 0)

    def lr_scales(self) -> dict[str, float]:
        """The factor on the learning rate of the next step, by parameter name."""
        return {name: group.rate()(p) for group in self._groups.values() for name, p in group.parameters.items()}

    def before_step(self, optimizer: Optimizer) -> None:
        group = self._group(optimizer)
        self._adopt(group, optimizer)
        self._before = None
        if self.watch(group.steps):
            self._before = [view.clone() for view in group.views(group.parameters)]
        if isinstance(group.lr_scale, Agreement):
            group.lr_scale.before_step(group.steps, group.by_name())

    def begin_update(self, optimizer: Optimizer) -> None:
        self._rates.scale(optimizer, self._group(optimizer).rate())

    def end_update(self, optimizer: Optimizer) -> None:
        self._rates.restore()

    def after_step(self, optimizer: Optimizer) -> None:
        group = self._group(optimizer)
        if isinstance(group.lr_scale, Agreement):
            group.lr_scale.after_step(group.by_name())
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
        job = Job(group.name, group.exchanges, group.anchor, sparse, group.views(sparse), dense, group.views(dense))
        group.exchanges += 1
        # picked here and not on the worker: the next step changes the weights
        group.flight = self._reducer.submit_picked(self._reducer.pick(job))
        if not self._config.overlap:
            self._merge(group)

    def check(self) -> None:
        """Nothing: errors are raised where an exchange is waited for."""

    @torch.no_grad()
    def restart(self) -> None:
        for group in self._groups.values():
            if group.flight is not None:
                group.flight.result()
            group.restart()
        self._shared = self._finished = False

    def enter_shared(self) -> None:
        self._enter(together=True)

    @torch.no_grad()
    def leave_shared(self) -> None:
        if not self._shared:
            return
        self._shared = False
        for group in self._groups.values():
            for view, own in zip(group.views(group.parameters), group.own, strict=True):
                view.copy_(own)
            group.own = []

    @contextmanager
    def shared(self, together: bool) -> Iterator[None]:
        """The module shows the anchor inside the block.

        Args:
            together: every rank enters it, so buffers can be shared and exchanges waited for.
        """
        if self._shared or self._finished:
            yield
            return
        self._enter(together)
        try:
            yield
        finally:
            self.leave_shared()

    def finish(self) -> None:
        self._end(together=True)

    @torch.no_grad()
    def settle(self) -> None:
        """After everybody's last hook: weights that a callback replaced since ``finish`` are averaged over ranks.

        Every rank calls it.
        """
        weights, moved = [], torch.zeros(1)
        for group in self._groups.values():
            for view, anchor in group.pairs():
                weights.append(view)
                moved += not torch.equal(view, anchor.to(view.dtype))
        device = weights[0].device if weights else None
        transport = self._reducer.transport

        def agree() -> None:
            if bool(transport.all_reduce_mean_(moved.to(device)).any()):
                average(weights, transport)

        self._reducer.call(agree)

    def abandon(self) -> None:
        """Training ended early: the module keeps the anchor, and nobody is waited for."""
        self._end(together=False)

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        squares = 0.0
        for group in self._groups.values():
            for view, anchor in group.pairs():
                squares += float((view.float() - anchor).double().square().sum())
        return {"left": math.sqrt(squares), "input": math.hypot(*(group.moved for group in self._groups.values()))}

    def _factors(self, name: str, is_linear: bool) -> tuple[Schedule, Schedule | Agreement]:
        """The anchor step and the learning rate's scale for one optimizer."""
        config, eta = self._config, self._config.anchor_step
        agreed = self._reducer.compressor.agreed
        if config.lr_scale is not None:
            scale: Schedule | Agreement = _schedule(config.lr_scale)
        elif agreed and not is_linear and eta is None:
            scale = Agreement(name, self._reducer)
        else:
            # whoever gives an anchor step has put the factor there
            scale = constant(1.0)
        if eta is None:
            # local Adam divides by the noise of one rank's gradient, dense Adam by that of the mean
            eta = 1.0 if agreed or is_linear else math.sqrt(self._reducer.transport.world_size)
        return _schedule(eta), scale

    def _adopt(self, group: Group, optimizer: Optimizer) -> None:
        """Take up parameters that the optimizer has got since; they have not been trained, so ranks agree on them."""
        count = sum(len(entry["params"]) for entry in optimizer.param_groups)
        if count == group.known:
            return
        group.known = count
        mine = [id(p) for entry in optimizer.param_groups for p in entry["params"]]
        # a parameter of two optimizers belongs to the first
        group.add(dict(self._unowned.pop(key) for key in mine if key in self._unowned))

    @torch.no_grad()
    def _enter(self, together: bool) -> None:
        # an error in a step ends it without notice
        self._rates.restore()
        if self._shared or self._finished:
            return
        self._shared = True
        self._show_anchor(keep=True, together=together)

    @torch.no_grad()
    def _end(self, together: bool) -> None:
        self._rates.restore()
        if self._finished:
            return
        self.leave_shared()
        self._show_anchor(keep=False, together=together)
        self._finished = True

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

    def _show_anchor(self, keep: bool, together: bool) -> None:
        for group in self._groups.values():
            if together:
                self._merge(group)
            group.own = [view.clone() for view in group.views(group.parameters)] if keep else []
            for view, anchor in group.pairs():
                view.copy_(anchor)
        if together:
            self._share_rest()

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


def _schedule(value: float | Schedule) -> Schedule:
    return value if callable(value) else constant(float(value))
