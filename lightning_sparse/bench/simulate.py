"""Trains a LightningModule on virtual ranks: one thread a rank, the taps and reducers of real training."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lightning_sparse.arguments import is_linear
from lightning_sparse.bench.recipes import Recipe
from lightning_sparse.communicators import VirtualRanks
from lightning_sparse.protocols import Transport
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant
from lightning_sparse.sync import Gradients, Updates
from lightning_sparse.sync.gradients import GradientsTap
from lightning_sparse.sync.steps import Steps
from lightning_sparse.sync.updates_tap import UpdatesTap


@dataclass(frozen=True)
class Problem:
    """What is trained: a LightningModule, its data, and the norm that gradients are clipped to.

    All of its optimizers step on the same loss; schedulers step with them.
    """

    module: Any
    train: DataLoader[Any]
    val: DataLoader[Any]
    clip: float | None = None


@dataclass
class Curve:
    """Validation losses by step, and the bytes that one rank has sent + received by then."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


def simulate(
    problem: Problem, recipe: Recipe, world_size: int, density: float, steps: int, points: int, tick: Callable[[], None]
) -> Curve:
    """Train for ``steps`` steps on ``world_size`` virtual ranks; validate about ``points`` times.

    Each rank sees the samples that Lightning's distributed sampler would give it. ``tick`` is called after each step.
    """
    every = max(1, steps // points)

    def rank(transport: Transport) -> Curve:
        torch.set_num_threads(1)
        return _Rank(problem, recipe, transport, density).train(steps, every, tick)

    return VirtualRanks(world_size).run(rank)[0]


class GradientBucket:
    """All gradients in one buffer, as DDP would hand them to the hook."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self._weights = weights
        self._flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in weights])

    def buffer(self) -> Tensor:
        return self._flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def parameters(self) -> list[nn.Parameter]:
        return self._weights

    def gradients(self) -> list[Tensor]:
        cut = self._flat.split([p.numel() for p in self._weights])
        return [x.view_as(p) for x, p in zip(cut, self._weights, strict=True)]

    def write(self) -> None:
        for parameter, mean in zip(self._weights, self.gradients(), strict=True):
            parameter.grad = mean


class _Rank:
    def __init__(self, problem: Problem, recipe: Recipe, transport: Transport, density: float) -> None:
        self.module = copy.deepcopy(problem.module)
        self.logged: dict[str, float] = {}
        self.module.log = self._log
        self.module.log_dict = self._log_dict
        self.optimizers, self.schedulers = _configured(self.module)
        self.problem, self.recipe, self.transport = problem, recipe, transport
        self.weights = [p for p in self.module.parameters() if p.requires_grad]
        # dense training is density 1 through the same reducer
        share = constant(1.0 if recipe.exchange is None else density)
        device = torch.device("cpu")
        self.reducer = Reducer(recipe.compressor, recipe.codec, recipe.communicator, transport, share, device)
        self.tap: GradientsTap | UpdatesTap
        if isinstance(recipe.exchange, Updates):
            self.tap = UpdatesTap(recipe.exchange, self.reducer, self.module, self.optimizers, is_linear)
        else:
            config = recipe.exchange if isinstance(recipe.exchange, Gradients) else Gradients()
            self.tap = GradientsTap(config, self.reducer, recipe.memory(), self.module, False, lambda: 1.0)
        # tells the tap of every step
        self.steps = Steps(self.tap, self.optimizers)

    def train(self, steps: int, every: int, tick: Callable[[], None]) -> Curve:
        curve, batches = Curve(), self._batches()
        for step in range(1, steps + 1):
            self._step(next(batches))
            if step % every == 0 or step == steps:
                curve.steps.append(step)
                curve.losses.append(self._validate())
                curve.bytes.append(self.transport.bytes)
            if self.transport.rank == 0:
                tick()
        self.reducer.close()
        return curve

    def _step(self, batch: Any) -> None:
        self.module.zero_grad()
        self.module.training_step(batch).backward()
        if isinstance(self.tap, GradientsTap):
            bucket = GradientBucket(self.weights)
            self.tap.hook(None, bucket).wait()  # type: ignore[arg-type]
            self.tap.check()
            bucket.write()
        if self.problem.clip is not None:
            nn.utils.clip_grad_norm_(self.weights, self.problem.clip)
        for stepped in (*self.optimizers, *self.schedulers):
            stepped.step()

    def _validate(self) -> float:
        self.tap.enter_shared()
        losses, sizes = [0.0], [1]
        # ranks show equal weights, so one of them speaks for all
        if self.transport.rank == 0:
            self.module.eval()
            with torch.no_grad():
                losses = [self._loss(batch) for batch in self.problem.val]
                sizes = [len(batch[0]) for batch in self.problem.val]
            self.module.train()
        self.tap.leave_shared()
        return fmean(losses, sizes)

    def _loss(self, batch: Any) -> float:
        self.module.validation_step(batch)
        return self.logged["val_loss"]

    def _log(self, name: str, value: Any, **_: Any) -> None:
        self.logged[name] = float(value.detach()) if isinstance(value, Tensor) else float(value)

    def _log_dict(self, values: dict[str, Any], **_: Any) -> None:
        for name, value in values.items():
            self._log(name, value)

    def _batches(self) -> Iterator[Any]:
        loader = self.problem.train
        shuffle = isinstance(loader.sampler, RandomSampler)
        # as Lightning makes it: the seed is that of seed_everything
        sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset,
            self.transport.world_size,
            self.transport.rank,
            shuffle=shuffle,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
        )
        mine: DataLoader[Any] = DataLoader(
            loader.dataset, loader.batch_size, sampler=sampler, drop_last=loader.drop_last
        )
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from mine
            epoch += 1


def _configured(module: Any) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Optimizers and schedulers, from any of the forms that ``configure_optimizers`` may return but None."""
    configured = module.configure_optimizers()
    pair = isinstance(configured, (list, tuple)) and len(configured) == 2 and isinstance(configured[0], (list, tuple))
    listed, schedulers = configured if pair else (configured, [])
    optimizers = []
    for entry in listed if isinstance(listed, (list, tuple)) else [listed]:
        # a dictionary holds one optimizer, and perhaps its scheduler
        optimizers.append(entry["optimizer"] if isinstance(entry, dict) else entry)
        if isinstance(entry, dict) and "lr_scheduler" in entry:
            schedulers = [*schedulers, entry["lr_scheduler"]]
    return optimizers, [entry["scheduler"] if isinstance(entry, dict) else entry for entry in schedulers]
