"""What was not sent stays with the rank that holds it: float32, unscaled, keyed by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.accumulator import MomentumSum, Sum, Vectors, advance_
from lightning_sparse.kernels.scatter_add import scatter_add_
from lightning_sparse.kernels.take import take
from lightning_sparse.protocols import Accumulator, Owed
from lightning_sparse.vector import SparseVector

# so much larger than the one before, a gradient would leave too much of its rounding where it is taken out again
_JUMP = 16.0


class Buffers(dict[str, Tensor]):
    """Parameter name -> flat float32 buffer, made of zeros when first asked for."""

    def of(self, names: Sequence[str], like: Sequence[Tensor]) -> list[Tensor]:
        for name, x in zip(names, like, strict=True):
            buffer = self.get(name)
            if buffer is None:
                self[name] = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
            elif buffer.numel() != x.numel():
                raise ValueError(
                    f"Residual of {name!r} has {buffer.numel()} elements, expected {x.numel()}:"
                    " the state belongs to another model"
                )
            elif buffer.device != x.device:
                self[name] = buffer.to(x.device)
        return [self[name] for name in names]

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.pop(name) for name in names if name in self}

    def norm(self) -> float:
        return math.sqrt(sum(float(buffer.double().square().sum()) for buffer in self.values()))

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.clear()
        self.update({name: buffer.detach().to(torch.float32).flatten().clone() for name, buffer in state.items()})


@dataclass
class Residual:
    """Error feedback: what is not sent now is added to the next gradient.

    A step that any rank refuses is taken out again: to rounding of the gradients before, exactly if this one is more
    than 16 times larger.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, section 3; for top-k: Stich et al.,
    https://arxiv.org/abs/1809.07599, Algorithm 1. We keep it without the learning rate in it.

    Example:
        >>> Residual().state_dict()
        {'residual': {}, 'lost': {}}
    """

    _residual: Buffers = field(init=False, repr=False, default_factory=Buffers)
    _lost: Buffers = field(init=False, repr=False, default_factory=Buffers)
    _copies: dict[str, list[Tensor]] = field(init=False, repr=False, default_factory=dict)
    _peak: float = field(init=False, repr=False, default=0.0)
    _peaks: dict[str, float] = field(init=False, repr=False, default_factory=dict)

    def begin(self, inputs: Sequence[Tensor], peak: float) -> None:
        self._peak = peak

    def accumulate(self, names: Sequence[str], inputs: Sequence[Tensor]) -> Accumulator:
        residuals = self._residual.of(names, inputs)
        self._set_aside(names, residuals)
        return Sum(inputs, residuals)

    def dense(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [x.float() for x in inputs]

    def discard(self, names: Sequence[str], sent: SparseVector) -> None:
        sent.add_to([self._residual[name] for name in names], alpha=-1.0)

    def discard_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._residual[name].zero_()

    def give_back(self, names: Sequence[str], entries: SparseVector) -> None:
        entries.add_to([self._residual[name] for name in names])

    def undo(self, names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        for name, x in zip(names, inputs, strict=True):
            if not self._restore(name) and name in self._residual:
                self._residual[name].sub_(x)

    def lost(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._lost.of(names, inputs)

    def reclaim(self, names: Sequence[str], inputs: Sequence[Tensor], world_size: int) -> None:
        known = [(name, x) for name, x in zip(names, inputs, strict=True) if name in self._lost]
        residuals = self._residual.of([name for name, _ in known], [x for _, x in known])
        for (name, _), residual in zip(known, residuals, strict=True):
            # a part of the mean: this rank's entries count for one in world_size
            residual.add_(self._lost.pop(name), alpha=world_size)

    def hold(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        return [self._residual.take(names)]

    def release(self, held: list[dict[str, Tensor]]) -> None:
        self._residual.update(held[0])

    def norm(self) -> float:
        return self._residual.norm()

    def _kept(self) -> list[Buffers]:
        """What a step changes."""
        return [self._residual]

    def _set_aside(self, names: Sequence[str], *kept: Sequence[Tensor]) -> None:
        """Before a gradient out of the ordinary is added: copies, in the order of ``_kept``."""
        is_ordinary = self._peak <= _JUMP * min((self._peaks.get(name, 0.0) for name in names), default=0.0)
        for name, *buffers in zip(names, *kept, strict=True):
            self._peaks[name] = self._peak
            self._copies.pop(name, None)
            if not is_ordinary:
                self._copies[name] = [buffer.clone() for buffer in buffers]

    def _restore(self, name: str) -> bool:
        """Puts back what was set aside; False if nothing was."""
        # the next gradient is compared with none
        self._peaks.pop(name, None)
        copies = self._copies.pop(name, [])
        for kept, copy in zip(self._kept(), copies, strict=False):
            kept[name] = copy
        return bool(copies)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"residual": dict(self._residual), "lost": dict(self._lost)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._residual.load(state["residual"])
        self._lost.load(state["lost"])


@dataclass
class MomentumResidual(Residual):
    """Deep Gradient Compression: momentum before the selection, masked where an entry has left.

    Use an optimizer without momentum of its own; this memory applies it, to densely averaged parameters too.

    Source: Lin et al., "Deep Gradient Compression", https://arxiv.org/abs/1712.01887, sections 3.1 to 3.3 and
    Algorithm 1. Local clipping runs over one submission (a bucket, or the model with ``scope="model"``) where the
    paper's runs over the model. At density 1 momentum is not masked: it is then momentum SGD.

    Args:
        momentum: in [0, 1).
        clip: largest norm of this rank's own gradient, or None. The paper takes the global threshold times
            ``world_size ** -0.5``; it takes the place of the Trainer's ``gradient_clip_val``.

    Example:
        >>> MomentumResidual(0.9, clip=1.0).momentum
        0.9
    """

    momentum: float = 0.9
    clip: float | None = None
    _velocity: Buffers = field(init=False, repr=False, default_factory=Buffers)
    _masked: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(init=False, repr=False, default_factory=dict)
    _scale: float = field(init=False, repr=False, default=1.0)

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"MomentumResidual: momentum must be in [0, 1), got {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"MomentumResidual: clip must be positive or None, got {self.clip}")

    def begin(self, inputs: Sequence[Tensor], peak: float) -> None:
        super().begin(inputs, peak)
        if self.clip is not None and inputs:
            norm = float(torch.linalg.vector_norm(torch.stack([x.float().norm() for x in inputs])))
            self._scale = min(1.0, self.clip / (norm + 1e-6))

    def accumulate(self, names: Sequence[str], inputs: Sequence[Tensor]) -> Accumulator:
        velocities, residuals = self._velocity.of(names, inputs), self._residual.of(names, inputs)
        self._set_aside(names, velocities, residuals)
        return MomentumSum(inputs, velocities, residuals, self.momentum, self._scale)

    def dense(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        velocities = self._velocity.of(names, inputs)
        self._set_aside(names, velocities)
        for velocity, x in zip(velocities, inputs, strict=True):
            advance_(velocity, x, self.momentum, self._scale)
        return velocities

    def discard(self, names: Sequence[str], sent: SparseVector) -> None:
        super().discard(names, sent)
        velocity = [self._velocity[name] for name in names]
        masked = take(velocity, sent.values, sent.indices)
        scatter_add_(velocity, masked, sent.indices, alpha=-1.0)
        self._masked[tuple(names)] = (sent.indices, masked)

    def give_back(self, names: Sequence[str], entries: SparseVector) -> None:
        super().give_back(names, entries)
        if (key := tuple(names)) in self._masked:
            indices, masked = self._masked[key]
            returned = torch.where(torch.isin(indices, entries.indices[entries.values != 0]), masked, 0.0)
            scatter_add_([self._velocity[name] for name in names], returned, indices)

    def undo(self, names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        for name, x in zip(names, inputs, strict=True):
            if self._restore(name):
                continue
            if name in self._residual:
                self._residual[name].sub_(self._velocity[name])
            # without momentum nothing of before is left in it
            if self.momentum:
                self._velocity[name].sub_(x, alpha=self._scale).div_(self.momentum)

    def _kept(self) -> list[Buffers]:
        return [self._velocity, *super()._kept()]

    def hold(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        return [*super().hold(names), self._velocity.take(names)]

    def release(self, held: list[dict[str, Tensor]]) -> None:
        super().release(held)
        self._velocity.update(held[1])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return super().state_dict() | {"velocity": dict(self._velocity)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state_dict(state)
        self._velocity.load(state["velocity"])


@dataclass
class NoMemory:
    """Nothing is kept: what is not sent is lost. For comparison, and for compressors that are unbiased.

    Example:
        >>> NoMemory().norm()
        0.0
    """

    def begin(self, inputs: Sequence[Tensor], peak: float) -> None:
        """Nothing depends on the whole."""

    def accumulate(self, names: Sequence[str], inputs: Sequence[Tensor]) -> Accumulator:
        return Vectors(inputs)

    def dense(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [x.float() for x in inputs]

    def discard(self, names: Sequence[str], sent: SparseVector) -> None:
        """Nothing to discard."""

    def discard_all(self, names: Sequence[str]) -> None:
        """Nothing to discard."""

    def give_back(self, names: Sequence[str], entries: SparseVector) -> None:
        """Nothing to return to."""

    def undo(self, names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        """Nothing was kept."""

    def lost(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros(x.numel(), dtype=torch.float32, device=x.device) for x in inputs]

    def reclaim(self, names: Sequence[str], inputs: Sequence[Tensor], world_size: int) -> None:
        """Nothing was kept."""

    def hold(self, names: Sequence[str]) -> None:
        """Nothing to set aside."""

    def release(self, held: None) -> None:
        """Nothing to put back."""

    def norm(self) -> float:
        return 0.0

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Nothing to load."""


def fold(owed: Owed, kind: str, lost: Mapping[str, Tensor], world_size: int) -> Owed:
    """Count what averaging has rounded away on this rank as a debt of ``kind``: it is a part of the mean."""
    debts = dict(owed.get(kind, {}))
    for name, x in lost.items():
        debts[name] = debts[name] + world_size * x if name in debts else world_size * x
    return owed | ({kind: debts} if debts else {})
