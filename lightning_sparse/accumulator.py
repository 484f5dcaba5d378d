"""What compressors read: residual + gradient, or weights - anchor, without building it before it is needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sparse.kernels.accumulate_select import accumulate_select
from lightning_sparse.kernels.difference_select import difference_select
from lightning_sparse.kernels.momentum_select import momentum_select
from lightning_sparse.kernels.pieces import bounds_of
from lightning_sparse.kernels.select import select
from lightning_sparse.protocols import Accumulator
from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector


@dataclass
class Vectors:
    """Flat vectors that are already there, read as one."""

    vectors: Sequence[Tensor]
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.numel = sum(vector.numel() for vector in self.vectors)

    def split(self) -> list[Accumulator]:
        return [Vectors([vector]) for vector in self.vectors]

    def sample(self, size: int, draw: Draw) -> Tensor:
        positions = _positions(self.vectors, size, draw)
        return torch.cat([vector[at].float() for vector, at in zip(self.vectors, positions, strict=True)])

    def select(self, threshold: Tensor, capacity: int, start: int) -> tuple[SparseVector, Tensor]:
        values, indices, count = select(self.vectors, threshold, capacity, start)
        return SparseVector(values, indices, self.numel), count

    def block(self, start: int, numel: int) -> Tensor:
        return torch.cat([v[a:b].float() for v, a, b in overlaps(self.vectors, start, numel)])

    def pieces(self) -> list[Tensor]:
        return [vector.float() for vector in self.vectors]


@dataclass
class Sum:
    """residual + gradient; the residual takes the gradient up in place, in the first dense pass, just once."""

    gradients: Sequence[Tensor]
    residuals: Sequence[Tensor]
    numel: int = field(init=False)
    _added: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.numel = sum(gradient.numel() for gradient in self.gradients)

    def split(self) -> list[Accumulator]:
        # the parts take over: each adds its own gradient
        self._added = True
        return [Sum([g], [r]) for g, r in zip(self.gradients, self.residuals, strict=True)]

    def sample(self, size: int, draw: Draw) -> Tensor:
        if self._added:
            return Vectors(self.residuals).sample(size, draw)
        positions = _positions(self.residuals, size, draw)
        pairs = zip(self.residuals, self.gradients, positions, strict=True)
        return torch.cat([residual[at] + gradient[at].float() for residual, gradient, at in pairs])

    def select(self, threshold: Tensor, capacity: int, start: int) -> tuple[SparseVector, Tensor]:
        if self._added:
            return Vectors(self.residuals).select(threshold, capacity, start)
        self._added = True
        values, indices, count = accumulate_select(self.gradients, self.residuals, threshold, capacity, start)
        return SparseVector(values, indices, self.numel), count

    def block(self, start: int, numel: int) -> Tensor:
        return Vectors(self.pieces()).block(start, numel)

    def pieces(self) -> list[Tensor]:
        if not self._added:
            self._added = True
            for gradient, residual in zip(self.gradients, self.residuals, strict=True):
                residual.add_(gradient)
        return list(self.residuals)


@dataclass
class MomentumSum:
    """residual += velocity = momentum * velocity + scale * gradient: in place, in the first dense pass, once."""

    gradients: Sequence[Tensor]
    velocities: Sequence[Tensor]
    residuals: Sequence[Tensor]
    momentum: float
    scale: float
    numel: int = field(init=False)
    _added: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.numel = sum(gradient.numel() for gradient in self.gradients)

    def split(self) -> list[Accumulator]:
        # the parts take over: each adds its own gradient
        self._added = True
        pieces = zip(self.gradients, self.velocities, self.residuals, strict=True)
        return [MomentumSum([g], [v], [r], self.momentum, self.scale) for g, v, r in pieces]

    def sample(self, size: int, draw: Draw) -> Tensor:
        if self._added:
            return Vectors(self.residuals).sample(size, draw)
        positions, out = _positions(self.residuals, size, draw), []
        for g, v, r, at in zip(self.gradients, self.velocities, self.residuals, positions, strict=True):
            velocity = v[at]
            advance_(velocity, g[at], self.momentum, self.scale)
            out.append(velocity.add_(r[at]))
        return torch.cat(out)

    def select(self, threshold: Tensor, capacity: int, start: int) -> tuple[SparseVector, Tensor]:
        if self._added:
            return Vectors(self.residuals).select(threshold, capacity, start)
        self._added = True
        inputs = self.gradients, self.velocities, self.residuals, self.momentum, self.scale
        values, indices, count = momentum_select(*inputs, threshold, capacity, start)
        return SparseVector(values, indices, self.numel), count

    def block(self, start: int, numel: int) -> Tensor:
        return Vectors(self.pieces()).block(start, numel)

    def pieces(self) -> list[Tensor]:
        if not self._added:
            self._added = True
            for gradient, velocity, residual in zip(self.gradients, self.velocities, self.residuals, strict=True):
                advance_(velocity, gradient, self.momentum, self.scale)
                residual.add_(velocity)
        return list(self.residuals)


@dataclass
class Difference:
    """weights - anchor; read only."""

    weights: Sequence[Tensor]
    anchors: Sequence[Tensor]
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.numel = sum(weight.numel() for weight in self.weights)

    def split(self) -> list[Accumulator]:
        return [Difference([w], [x]) for w, x in zip(self.weights, self.anchors, strict=True)]

    def sample(self, size: int, draw: Draw) -> Tensor:
        positions = _positions(self.anchors, size, draw)
        pairs = zip(self.weights, self.anchors, positions, strict=True)
        return torch.cat([weight[at].float() - anchor[at] for weight, anchor, at in pairs])

    def select(self, threshold: Tensor, capacity: int, start: int) -> tuple[SparseVector, Tensor]:
        values, indices, count = difference_select(self.weights, self.anchors, threshold, capacity, start)
        return SparseVector(values, indices, self.numel), count

    def block(self, start: int, numel: int) -> Tensor:
        out, done = torch.empty(numel, device=self.anchors[0].device if self.anchors else None), 0
        for (weight, begin, end), anchor in zip(overlaps(self.weights, start, numel), self.anchors, strict=True):
            part = out[done : done + end - begin]
            torch.sub(weight[begin:end], anchor[begin:end], out=part)
            done += end - begin
        return out

    def pieces(self) -> list[Tensor]:
        return [weight.float() - anchor for weight, anchor in zip(self.weights, self.anchors, strict=True)]


def advance_(velocity: Tensor, gradient: Tensor, momentum: float, scale: float) -> None:
    """velocity = momentum * velocity + scale * gradient in place, rounded as `momentum_select` does."""
    # `add_` with a factor would round product and sum together on some devices
    velocity.mul_(momentum).add_(gradient if scale == 1 else gradient.float() * scale)


def overlaps(vectors: Sequence[Tensor], start: int, numel: int) -> list[tuple[Tensor, int, int]]:
    """Which part of each vector lies in [start, start + numel) of the whole: (vector, from, to), maybe empty."""
    out, offset = [], 0
    for vector in vectors:
        low, high = (min(max(at - offset, 0), vector.numel()) for at in (start, start + numel))
        out.append((vector, low, high))
        offset += vector.numel()
    return out


def _positions(vectors: Sequence[Tensor], size: int, draw: Draw) -> list[Tensor]:
    """Ascending positions in each vector, one drawn at random from each of ``size`` equal strata of the whole."""
    bounds, device = bounds_of(vectors), vectors[0].device
    numel, stride = bounds[-1], bounds[-1] / max(1, size)
    random = draw.bits(size, device).to(torch.float64) / 2**32  # [size] in [0, 1)
    base = torch.arange(size, dtype=torch.float64, device=device)
    positions = ((base + random) * stride).long().clamp_(max=max(0, numel - 1))

    def position(stratum: int) -> int:
        return min(int((stratum + draw.word(stratum) / 2**32) * stride), numel - 1)

    # the host repeats the draws next to each bound, and so need not wait for those of the device
    cuts = [0]
    for bound in bounds[1:-1]:
        near = bound * size // max(1, numel)
        low, high = max(near - 1, cuts[-1]), min(near + 2, size)
        cuts.append(bisect_left(range(size), bound, low, high, key=position))
    parts = positions.split([high - low for low, high in pairwise([*cuts, size])])
    return [part - begin if begin else part for part, begin in zip(parts, bounds, strict=False)]
