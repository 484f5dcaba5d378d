"""Where AdaScaleLR gets its squared norms: from passes of one rank, or from the gradients of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_sparse.job import Job, Outcome
from lightning_sparse.memory import MomentumResidual
from lightning_sparse.optim.norms import Groups, Passes, by_group, device_of, gradients, group_squares, squares
from lightning_sparse.optim.sketch import sketch
from lightning_sparse.random import Draw
from lightning_sparse.reducer import Reducer
from lightning_sparse.sync.gradients import GradientsTap
from lightning_sparse.sync.updates_tap import UpdatesTap


@dataclass(frozen=True)
class Norms:
    """Of one step: for each parameter group, the mean over samples of the squared norm, and that of their mean.

    Args:
        passes: in a sample, the mean over ranks.
    """

    each: list[float]
    mean: list[float]
    samples: int
    passes: float


class Source(Protocol):
    """Measures one step after the other, alike on every rank."""

    how: str

    def behind_backward(self, loss_scale: float) -> None:
        """Behind each backward pass; ``loss_scale`` is the factor on the gradients now."""

    def before_step(self, passes: int, divided_by: int) -> Callable[[], Norms]:
        """Begin to measure: gradients are unscaled and not clipped. What comes back waits for the norms.

        Args:
            passes: that were accumulated for this step.
            divided_by: what each loss was divided by.
        """


class OwnPasses:
    """One rank: the gradient of each pass is a sample."""

    how = "its passes"

    def __init__(self, groups: Callable[[], Groups]) -> None:
        self._groups = groups
        self._passes = Passes()

    def behind_backward(self, loss_scale: float) -> None:
        self._passes.add(self._groups(), loss_scale)

    @torch.no_grad()
    def before_step(self, passes: int, divided_by: int) -> Callable[[], Norms]:
        mean = group_squares(self._groups())
        each, count = self._passes.take()
        if not count:
            # no pass had a loss: ``mean`` is NaN, and so is what there is to say of each
            each = mean
        buffer = divided_by**2 * torch.cat([each.to(mean.device), mean / max(1, count) ** 2])
        return lambda: _norms(buffer, len(mean), None, count, 1)


class OwnGradients:
    """``Updates`` on several ranks: each rank's gradient is a sample; their mean is never formed, but sketched."""

    how = "each rank's gradient, their mean by a sketch"

    def __init__(self, groups: Callable[[], Groups], tap: UpdatesTap, reducer: Reducer) -> None:
        self._groups, self._tap, self._reducer = groups, tap, reducer
        tap.is_observed = True

    def behind_backward(self, loss_scale: float) -> None:
        """Nothing: the sum over passes is looked at."""

    @torch.no_grad()
    def before_step(self, passes: int, divided_by: int) -> Callable[[], Norms]:
        groups = self._groups()
        found = gradients(groups).values()
        # a rank without any has refused its step: every rank learns of it
        each = group_squares(groups)
        vectors = [(x.to_dense() if x.is_sparse else x).flatten() for x, _ in found]
        draw = Draw(self._reducer.seed, self._tap.steps, "gain")
        sketched = sketch(vectors, [at for _, at in found], len(groups), draw)
        return _average(self._reducer, each, sketched, passes, divided_by)


class TappedGradients:
    """``Gradients`` on several ranks: each rank's gradient is a sample, seen before the exchange.

    Where the exchange is dense and nothing was kept, the mean is seen behind it; otherwise it is sketched, as a sparse
    mean with error feedback is not the mean of these gradients.
    """

    how = "each rank's gradient, their mean behind a dense exchange or by a sketch"

    def __init__(
        self, groups: Callable[[], Groups], names: Mapping[int, str], tap: GradientsTap, reducer: Reducer
    ) -> None:
        self._groups, self._names, self._reducer = groups, names, reducer
        self._device = device_of(groups())
        self._assign()
        self._each: list[Tensor] = []
        self._sketches: list[Tensor] = []
        self._means: list[Tensor] = []
        self._step: int | None = None
        self._was_dense = self._is_exact = False
        tap.observers.append(self)

    def behind_backward(self, loss_scale: float) -> None:
        """Nothing: the tap has shown what there is."""

    @torch.no_grad()
    def before(self, job: Job) -> None:
        self._begin(job)
        vectors, owner = self._mine(job)
        if not vectors:
            return
        self._each.append(by_group(squares(vectors), owner, self._count))
        if not self._is_exact:
            draw = Draw(self._reducer.seed, job.step, f"gain of {job.name}")
            self._sketches.append(sketch(vectors, owner, self._count, draw))

    @torch.no_grad()
    def after(self, outcome: Outcome) -> None:
        vectors, owner = self._mine(outcome.picked.job)
        if vectors and self._is_exact:
            self._means.append(by_group(squares(vectors), owner, self._count))

    @torch.no_grad()
    def before_step(self, passes: int, divided_by: int) -> Callable[[], Norms]:
        each, sketches, means = self._each, self._sketches, self._means
        self._each, self._sketches, self._means = [], [], []
        nothing = torch.full((self._count,), torch.nan, device=self._device)
        # buckets are sketched with signs of their own, so that their sum is a sketch too
        mean = torch.stack(sketches or means or [nothing]).sum(0)
        return _average(self._reducer, torch.stack(each or [nothing]).sum(0), mean, passes, divided_by)

    def _mine(self, job: Job) -> tuple[list[Tensor], list[int]]:
        pairs = zip((*job.names, *job.dense_names), (*job.inputs, *job.dense_inputs), strict=True)
        mine = [(x, self._owner[name]) for name, x in pairs if name in self._owner]
        return [x for x, _ in mine], [at for _, at in mine]

    def _assign(self) -> None:
        """Find out whose parameters are whose: groups may be added between steps."""
        groups, names = self._groups(), self._names
        self._count = len(groups)
        self._owner = {names[id(p)]: at for at, group in enumerate(groups) for p in group["params"] if id(p) in names}

    def _begin(self, job: Job) -> None:
        """Once a step: find out whether what comes back is the mean of what comes in, and of nothing else."""
        if job.step == self._step:
            return
        self._assign()
        is_dense = self._reducer.averages_all(job.step) and not isinstance(job.memory, MomentumResidual)
        # the first dense exchange behind a sparse one takes along what was kept
        is_empty = job.memory.norm() == 0 if self._step is None else self._was_dense
        self._is_exact, self._was_dense, self._step = is_dense and is_empty, is_dense, job.step


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _average(reducer: Reducer, each: Tensor, mean: Any, passes: int, divided_by: int) -> Callable[[], Norms]:
    """Average the norms, [groups], and the norms or sketches of the mean over ranks, behind what is in flight."""
    groups, width = len(each), None if mean.ndim == 1 else mean.shape[1]
    factor = divided_by / max(1, passes)
    norms = [factor**2 * each, (factor if width else factor**2) * mean.flatten().to(each.device)]
    # one size on all ranks: one without gradients does not know that the others' are float64
    buffer = torch.cat([*norms, each.new_full((1,), passes)]).float()
    future: Future[Tensor] = reducer.submit_mean(buffer)

    def wait() -> Norms:
        *result, made = future.result().split([groups, len(buffer) - groups - 1, 1])
        ranks = reducer.transport.world_size
        # a rank may have left a pass out; the mean over ranks has been rounded
        return _norms(torch.cat(result), groups, width, ranks, round(float(made) * ranks) / ranks)

    return wait


def _norms(buffer: Tensor, groups: int, width: int | None, samples: int, passes: float) -> Norms:
    each, mean = buffer[:groups], buffer[groups:]
    if width is not None:
        mean = mean.view(groups, width).square().sum(1)
    both = torch.cat([each, mean]).tolist()
    return Norms(both[:groups], both[groups:], samples, passes)
