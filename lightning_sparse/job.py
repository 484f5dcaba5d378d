"""What passes through the reducer: a job, what was picked of it, what came back, and sums over all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_sparse.protocols import Mean, Memory
from lightning_sparse.vector import SparseVector


@dataclass(frozen=True)
class Job:
    """Flat vectors of named parameters that are exchanged together. Equal layout on every rank."""

    name: str
    step: int
    memory: Memory
    names: Sequence[str]
    inputs: Sequence[Tensor]
    dense_names: Sequence[str] = ()
    dense_inputs: Sequence[Tensor] = ()
    idle: Sequence[str] = ()
    """Names out of ``names`` and ``dense_names`` that take no part in this step: what is kept for them stays kept."""
    is_safe: bool = False
    """What is not finite would show in the payload, and spoil no memory: nobody need look for it beforehand."""


@dataclass(frozen=True)
class Picked:
    """What leaves this rank: entries of the sparse part, and all of the dense part."""

    job: Job
    density: float
    sent: SparseVector | None
    wire: Tensor | None
    tail: Tensor
    """[elements of everything that is averaged densely] float32."""
    finite: bool = True


@dataclass(frozen=True)
class Outcome:
    """What the exchange brought: the mean of the sparse part (None at density 1) and of the dense part."""

    picked: Picked
    mean: Mean | None
    tail: Tensor
    finite: bool
    """False on every rank if any rank handed over NaN or inf."""


@dataclass
class Totals:
    """Sums since the start, for reports."""

    submitted: int = 0
    """Exchanges begun; those in flight are in none of the other sums."""
    exchanges: int = 0
    bytes: int = 0
    """What the transport had counted when the last exchange ended."""
    entries: int = 0
    """Entries that payloads had room for, dense parts included."""
    numel: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By stage: select, encode, exchange, decode."""
