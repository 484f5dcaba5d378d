"""The seams: one protocol for each noun of the loop. Arrows point one way, from the reducer to its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector

Schedule = Callable[[int], float]
"""From step (own counter, starting at 0) to a number, such as the density. A lambda is a schedule."""


class Accumulator(Protocol):
    """What a rank owes the others, as a list of flat float32 pieces that are read as one vector of ``numel``."""

    numel: int

    def split(self) -> Sequence[Accumulator]:
        """One accumulator for each piece (selection by layer)."""

    def sample(self, size: int, draw: Draw) -> Tensor:
        """About ``size`` values, spread evenly over the vector: [m] float32. No dense pass."""

    def select(self, threshold: Tensor, capacity: int, start: int) -> tuple[SparseVector, Tensor]:
        """Entries with |value| >= threshold, in one dense pass, and how many there are (may exceed capacity)."""

    def block(self, start: int, numel: int) -> Tensor:
        """Neighbouring values from ``start`` on: [numel] float32. A dense pass only if something must be added."""

    def pieces(self) -> list[Tensor]:
        """The values themselves: [numel of the piece] float32 each. Costs a dense pass."""


@runtime_checkable
class Memory(Protocol):
    """What was not sent, kept by parameter name (float32, unscaled)."""

    def begin(self, inputs: Sequence[Tensor], peak: float) -> None:
        """Look at everything that came in, before any of it is accumulated; ``peak`` is its largest magnitude."""

    def accumulate(self, names: Sequence[str], inputs: Sequence[Tensor]) -> Accumulator:
        """Add this step's flat inputs to what is kept. The accumulator may do so lazily, in its first dense pass."""

    def dense(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        """What leaves for parameters that are averaged densely: [numel of the piece] float32 each."""

    def discard(self, names: Sequence[str], sent: SparseVector) -> None:
        """What receivers will decode has left this rank. In place, touches only the sent entries."""

    def discard_all(self, names: Sequence[str]) -> None:
        """Everything has left this rank (density 1)."""

    def give_back(self, names: Sequence[str], entries: SparseVector) -> None:
        """Entries that nobody accepted return to this rank's memory."""

    def undo(self, names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        """The step these inputs belong to does not take place; what had left of it was given back before."""

    def lost(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        """What averaging has rounded away here, for the communicator to keep: [numel of the piece] float32 each.

        Unlike everything else it is a part of the mean, not of this rank's own entries. Made of zeros at first.
        """

    def reclaim(self, names: Sequence[str], inputs: Sequence[Tensor], world_size: int) -> None:
        """Owe what is ``lost`` as this rank's own again: other ranks will average these entries from now on."""

    def hold(self, names: Sequence[str]) -> Any:
        """Set what is kept for these names aside, so that nothing of it leaves in this step."""

    def release(self, held: Any) -> None:
        """Put back what ``hold`` set aside."""

    def norm(self) -> float:
        """Euclidean norm of what is kept."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Buffers of this rank, by kind and parameter name."""

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over buffers saved by ``state_dict``."""


@runtime_checkable
class Compressor(Protocol):
    """Which entries of the accumulator are sent?"""

    @property
    def scope(self) -> str:
        """What one selection runs over: "layer", "bucket" or "model"."""

    @property
    def agreed(self) -> bool:
        """Whether every rank picks the same entries, whatever their values."""

    def capacity(self, numel: int, density: float) -> int:
        """Entries the payload holds: a function of (numel, density) only."""

    def compress(self, accumulator: Accumulator, capacity: int, draw: Draw) -> SparseVector:
        """Pick at most ``capacity`` entries. Pure: keeps no state between calls."""


@runtime_checkable
class Codec(Protocol):
    """Which bytes carry the entries?"""

    @property
    def agreed(self) -> bool:
        """Whether it can only carry entries that are agreed."""

    def nbytes(self, numel: int, capacity: int) -> int:
        """Bytes of a payload; a function of its arguments only."""

    def encode(self, vector: SparseVector) -> Tensor:
        """[nbytes] uint8."""

    def decode(self, wire: Tensor, numel: int, capacity: int) -> SparseVector:
        """The entries as receivers see them. Raises ValueError on a wire that ``encode`` cannot have made."""


class Transport(Protocol):
    """Moves buffers between ranks and counts the bytes; the only place that knows torch.distributed."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Sent + received by this rank so far, everything included."""

    def announce(self, job: str) -> None:
        """Say what the next collectives are for."""

    def all_gather(self, buffer: Tensor) -> Tensor:
        """[w, b] uint8 from every rank's [b] uint8, in rank order."""

    def all_to_all(self, buffer: Tensor) -> Tensor:
        """[w, b] uint8: row r is this rank's row of rank r's [w, b]."""

    def all_reduce_mean_(self, buffer: Tensor) -> Tensor:
        """The mean over ranks, in place: same shape and dtype."""

    def broadcast_(self, buffer: Tensor) -> Tensor:
        """Rank 0's buffer, in place."""


Lost = Callable[[], list[Tensor]]
"""Gives ``Memory.lost`` for the vector that is averaged; nothing is allocated unless a communicator asks."""


@dataclass(frozen=True)
class Mean:
    """The mean over ranks as ``scale * (parts[0] + parts[1] + ...)``, to be added in this order on every rank."""

    parts: list[SparseVector]
    scale: float
    rejected: SparseVector | None = None
    """Entries of this rank that are not in the mean."""
    finite: bool = True
    """False, on every rank, if any rank's entries are not finite."""


@runtime_checkable
class Communicator(Protocol):
    """How do ranks average?"""

    @property
    def agreed(self) -> bool:
        """Whether it can only average entries that are agreed."""

    def sections(self, world_size: int) -> int:
        """Parts of equal capacity that a payload is cut into; each is encoded on its own."""

    def mean(self, sent: SparseVector, wire: Tensor, codec: Codec, transport: Transport, lost: Lost) -> Mean:
        """Average one payload of every rank. Every rank calls it, in the same order; same bits on every rank.

        Args:
            sent: the payload as receivers see it, all sections end to end.
            wire: its sections: [s, b] uint8.
            codec: that encoded them.
            transport: to the other ranks.
            lost: gives the memory's buffers for what averaging rounds away.
        """

    def nbytes(self, payload: int, world_size: int) -> int:
        """Sent + received per rank for one exchange of payloads of ``payload`` bytes."""


Owed = dict[str, dict[str, Tensor]]
"""What a rank has still to share, by kind and parameter name: [n] float32 each. Ranks count through their mean."""


class Stepped(Protocol):
    """What is told of optimizer steps."""

    @property
    def steps(self) -> int:
        """Optimizer steps (updates) or synchronised backward passes (gradients) so far."""

    def before_step(self, optimizer: Any, announced: bool = False) -> None:
        """Called before every optimizer step, skipped ones included.

        Args:
            optimizer: about to step.
            announced: ``end_step`` will be called, whatever happens.
        """

    def end_step(self, optimizer: Any) -> None:
        """Called before ``after_step`` of an announced step, and also if the step raised."""

    def after_step(self, optimizer: Any) -> None:
        """Called after every optimizer step, skipped ones included."""

    def refuses(self, optimizer: Any) -> bool:
        """Whether the optimizer must not step, as gradients are not finite. Asked once, between backward and step."""

    def give_up(self, message: str) -> None:
        """After a refused step: see to it that every rank raises FloatingPointError."""


class Tap(Stepped, Protocol):
    """Where a training step hands over what is exchanged, and takes it back."""

    name: str
    beside: int
    """Bytes of float32 gradients that DDP has averaged in place of the exchange."""

    def check(self) -> None:
        """Raise what went wrong in an exchange since the last call."""

    def restart(self) -> None:
        """The module's weights were replaced, on every rank: nothing of before is owed any more."""

    def rest(self) -> str:
        """Between steps: DDP averages gradients from now on, so everything owed is shared now.

        Every rank calls it. Why that cannot be, and nothing is changed then; empty if it is done.
        """

    def resume(self) -> None:
        """Between steps: exchange again. Every rank calls it."""

    def enter_shared(self) -> None:
        """Put what is equal on all ranks into the module (before validation, say). Every rank calls it."""

    def leave_shared(self) -> None:
        """Return to this rank's own weights."""

    def finish(self) -> None:
        """The end of training: the module keeps what is equal on all ranks. Every rank calls it."""

    def equal(self) -> dict[str, Tensor]:
        """What must be bit-equal on all ranks now, by parameter name."""

    def norms(self) -> dict[str, float]:
        """Norms of what is kept back and of what came in at the last watched step."""

    def shared_state(self, together: bool = True) -> dict[str, Any]:
        """For a checkpoint: what is equal on all ranks, counters first.

        Args:
            together: every rank calls it, so that what is in flight can be waited for; otherwise it is left out.
        """

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``shared_state`` gave. Raises ValueError if it belongs to another model."""

    def own_state(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint: what is this rank's alone, by kind and parameter name. Every rank calls it."""

    def load_own_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what ``own_state`` gave, behind the shared state. Raises ValueError if it is of another model."""

    def owed(self, world_size: int) -> Owed:
        """What counts of the own state: its mean over ``world_size`` ranks is what they have still to share."""

    def load_owed(self, owed: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Owe this, and nothing else. Raises ValueError if it belongs to another model."""
