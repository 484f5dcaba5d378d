"""Agreement: how much of a step all ranks have in common, measured on a few weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from lightning_sparse.random import Draw
from lightning_sparse.reducer import Reducer

EVERY = 10
"""Steps between two measurements; the first ones are all measured."""
_KEEP = 0.9
_FRACTION, _LEAST, _MOST = 256, 8, 64
_LEVELS = 4


class Agreement:
    """Factors on learning rates that make the mean of local steps as long as the local steps.

    An adaptive optimizer divides by the root mean square of what it sees: locally of one rank's gradient, in dense
    training of the mean over ranks, whose noise is smaller. So local steps are shorter than dense ones where ranks
    disagree, by sqrt(world_size) at most. With u_r the step of rank r and ``rho = |mean of u_r|^2 / mean of |u_r|^2``,
    between 1 / world_size (noise alone) and 1 (ranks agree), the factor is ``rho ** -0.5``, for each parameter.

    Both parts of rho are running means over measurements, each of 8 to 64 weights of a parameter, drawn anew: less than
    0.05 % of dense bytes for matrices. Factors are rounded to quarters of an octave, so that an optimizer steps few
    groups of parameters.

    Args:
        name: of the stream of draws.
        reducer: averages the samples, behind the exchanges in flight.
    """

    def __init__(self, name: str, reducer: Reducer) -> None:
        self._name = name
        self._reducer = reducer
        self._positions: list[Tensor] | None = None
        self._before: Tensor | None = None
        self._names: list[str] = []
        self._flight: Future[Tensor] | None = None
        self._sums: dict[str, tuple[float, float]] = {}

    def factor(self, name: str) -> float:
        """Of one parameter, in [1, sqrt(world_size)]: 1 until it was measured. Equal on all ranks."""
        of_mean, of_each = self._sums.get(name, (0.0, 0.0))
        world = float(self._reducer.transport.world_size)
        inverse = min(world, of_each / of_mean) if of_mean > of_each / world else world
        octaves = math.log2(max(1.0, inverse)) / 2 if of_each else 0.0
        return 2.0 ** (round(octaves * _LEVELS) / _LEVELS)

    def before_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Remember a few weights, if this step is measured: by name, [n] in any dtype."""
        self._before = None
        if not weights or not (step < EVERY or step % EVERY == 0):
            return
        counts = [min(_MOST, max(_LEAST, x.numel() // _FRACTION)) for x in weights.values()]
        device = next(iter(weights.values())).device
        bits = Draw(self._reducer.seed, step, f"agreement of {self._name}").bits(sum(counts), device)
        rows = zip(bits.split(counts), weights.values(), strict=True)
        self._positions = [(row * x.numel()) >> 32 for row, x in rows]
        self._names = list(weights)
        self._before = _read(list(weights.values()), self._positions)

    def after_step(self, weights: Mapping[str, Tensor]) -> None:
        """Take what the last measurement brought, and begin to average this one. Every rank calls it."""
        before, self._before = self._before, None
        self._take()
        if before is None or self._positions is None:
            return
        step = _read([weights[name] for name in self._names], self._positions) - before
        squares = torch.stack([x.square().mean() for x in self._split(step)])
        payload = torch.cat([step, squares])
        self._flight = self._reducer.submit_mean(payload)

    def restart(self) -> None:
        """Forget what was measured."""
        self._take()
        self._sums = {}

    def _take(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        mean, each = flight.result().split([sum(len(x) for x in self._positions or []), len(self._names)])
        of_mean = torch.stack([x.square().mean() for x in self._split(mean)])
        for name, a, b in zip(self._names, of_mean.tolist(), each.tolist(), strict=True):
            # a parameter that nobody moved says nothing, one that is not finite is somebody else's to report
            if 0 < b < math.inf and math.isfinite(a):
                old = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (_KEEP * old[0] + (1 - _KEEP) * a, _KEEP * old[1] + (1 - _KEEP) * b)

    def _split(self, samples: Tensor) -> Sequence[Tensor]:
        return samples.split([len(x) for x in self._positions or []])


def _read(weights: Sequence[Tensor], positions: Sequence[Tensor]) -> Tensor:
    return torch.cat([x[at].float() for x, at in zip(weights, positions, strict=True)])
