"""Agreement: how much of a step all ranks have in common, measured on a few weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.random import Draw
from lightning_sparse.reducer import Reducer

EVERY = 10
"""Steps between two measurements; the first ones are all measured."""
# of the running means, at each measurement: about a hundred steps
_KEEP = 0.9
# samples of a parameter: one in so many of its weights, within these bounds
_FRACTION, _LEAST, _MOST = 256, 8, 64


class Agreement:
    """Factors on steps that make the mean of local steps as long as the local steps.

    An adaptive optimizer divides by the root mean square of what it sees: locally of one rank's gradient, in dense
    training of the mean over ranks, whose noise is smaller. So local steps are shorter than dense ones where ranks
    disagree, by sqrt(world_size) at most. With u_r the step of rank r and ``rho = |mean of u_r|^2 / mean of |u_r|^2``,
    between 1 / world_size (noise alone) and 1 (ranks agree), the factor is ``rho ** -0.5``, for each parameter.

    Both parts of rho are running means over measurements, each of 8 to 64 weights of a parameter, drawn anew, in the
    first ten steps and every tenth one behind them: 0.04 % of dense bytes for a matrix of 2048 to 16384 weights in the
    long run, less for larger ones.

    Args:
        name: of the stream of draws.
        reducer: averages the samples, behind the exchanges in flight.
    """

    def __init__(self, name: str, reducer: Reducer) -> None:
        self._name = name
        self._reducer = reducer
        self._positions: dict[str, Tensor] = {}
        self._before: Tensor | None = None
        self._flight: _Flight | None = None
        self._sums: dict[str, tuple[float, float]] = {}

    def factor(self, name: str) -> float:
        """Of one parameter, in [1, sqrt(world_size)]: 1 until it was measured. Equal on all ranks."""
        of_mean, of_each = self._sums.get(name, (1.0, 1.0))
        world = self._reducer.transport.world_size
        return math.sqrt(min(world, max(1.0, of_each / of_mean if of_mean > 0 else world)))

    def before_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Remember a few weights, if this step is measured: by name, [n] in any dtype."""
        self._before = None
        if not weights or not (step < EVERY or step % EVERY == 0):
            return
        counts = [min(_MOST, max(_LEAST, x.numel() // _FRACTION)) for x in weights.values()]
        device = next(iter(weights.values())).device
        bits = Draw(self._reducer.seed, step, f"agreement of {self._name}").bits(sum(counts), device)
        rows = zip(bits.split(counts), weights.items(), strict=True)
        self._positions = {name: (row * x.numel()) >> 32 for row, (name, x) in rows}
        self._before = _read(weights, self._positions)

    def after_step(self, weights: Mapping[str, Tensor], applied: Mapping[str, float]) -> None:
        """Take what the last measurement brought, and begin to average this one. Every rank calls it.

        Args:
            weights: by name, [n] in any dtype.
            applied: the factor that the step was made with, by name, 1 where there is none.
        """
        before, self._before = self._before, None
        self._take()
        if before is None:
            return
        counts = {name: at.numel() for name, at in self._positions.items()}
        step = _read(weights, self._positions) - before
        for name, samples in zip(counts, step.split(list(counts.values())), strict=True):
            samples.div_(applied.get(name, 1.0))
        squares = _squares(step, counts)
        self._flight = _Flight(counts, self._reducer.submit_mean(torch.cat([step, squares])))

    def restart(self) -> None:
        """Forget what was measured."""
        self._take()
        self._sums = {}

    def state_dict(self, together: bool = True) -> dict[str, Any]:
        """What was measured, the measurement in flight included if ``together``: equal on all ranks."""
        sums = {name: list(parts) for name, parts in self._sums.items()}
        flight = None
        if self._flight is not None and together:
            flight = {"counts": dict(self._flight.counts), "mean": self._flight.mean.result().clone()}
        return {"sums": sums, "flight": flight, "world_size": self._reducer.transport.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave; with another number of ranks, what it says of their steps' noise."""
        self._sums = {name: (of_mean, of_each) for name, (of_mean, of_each) in state["sums"].items()}
        before, now = state["world_size"], self._reducer.transport.world_size
        if before < 2 or not all(map(math.isfinite, itertools.chain(*self._sums.values()))):
            raise ValueError(f"Agreement: expected finite sums of at least 2 ranks, got {self._sums} of {before}")
        if before != now:
            # of steps = signal + noise, the mean over w ranks keeps the signal's square and 1 / w of the noise's
            share = (1 - 1 / now) / (1 - 1 / before)
            self._sums = {name: (each - (each - mean) * share, each) for name, (mean, each) in self._sums.items()}
        self._flight = None
        if (flight := state["flight"]) is not None and before == now:
            mean: Future[Tensor] = Future()
            mean.set_result(flight["mean"])
            self._flight = _Flight(dict(flight["counts"]), mean)

    def _take(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        counts = flight.counts
        mean, each = flight.mean.result().split([sum(counts.values()), len(counts)])
        for name, a, b in zip(counts, _squares(mean, counts).tolist(), each.tolist(), strict=True):
            # a parameter that nobody moved says nothing, one that is not finite is somebody else's to report
            if 0 < b < math.inf and math.isfinite(a):
                old = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (_KEEP * old[0] + (1 - _KEEP) * a, _KEEP * old[1] + (1 - _KEEP) * b)


@dataclass(frozen=True)
class _Flight:
    """A measurement on its way: the samples of each parameter, and the mean over ranks of steps and squares."""

    counts: dict[str, int]
    mean: Future[Tensor]


def _squares(samples: Tensor, counts: Mapping[str, int]) -> Tensor:
    """The mean square of each parameter's samples: [parameters]."""
    return torch.stack([x.square().mean() for x in samples.split(list(counts.values()))])


def _read(weights: Mapping[str, Tensor], positions: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name][at].float() for name, at in positions.items()])
