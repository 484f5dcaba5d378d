"""Ladder: densities and codecs from few bytes to many, and which of them a link has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_sparse.codecs import Quantized
from lightning_sparse.communicators.volume import ring_bytes
from lightning_sparse.protocols import Codec, Communicator, Compressor

# of the computation's time, what an exchange that nothing hides may take
_WAIT = 0.1
# a step up must fit with room, and a step down waits until the exchange is over its share by this factor
_ROOM, _OVER = 0.8, 1.25
_DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
# how many bits and which part: at equal bytes more bits of fewer entries lose more, see the README's table
_BLOCKS = ((1 / 16, 1), (1 / 8, 1), (1 / 4, 1), (1 / 2, 2), (1.0, 4), (1.0, 8))


@dataclass(frozen=True)
class Rung:
    """What is sent: a density in (0, 1] and the codec."""

    density: float
    codec: Codec

    def __str__(self) -> str:
        return f"density {self.density:g}, {self.codec}"


def make_rungs(compressor: Compressor, codec: Codec | None) -> tuple[list[Rung], int]:
    """All rungs, the lightest first, and where to begin; a codec that was asked for stays.

    Args:
        compressor: picks the entries.
        codec: None where blocks may take any number of bits.
    """
    if not compressor.agreed:
        assert codec is not None
        return [Rung(density, codec) for density in _DENSITIES], _DENSITIES.index(0.01)
    if codec is None:
        return [Rung(density, Quantized(bits)) for density, bits in _BLOCKS], 2
    densities = sorted({density for density, _ in _BLOCKS})
    return [Rung(density, codec) for density in densities], densities.index(1 / 4)


class Ladder:
    """Finds the rung that sends most without making training wait.

    Args:
        rungs: the lightest first.
        position: of the one in use.
        compressor, communicator: say what a rung moves.
        numel: trainable parameters.
        world_size: ranks.
        hides: whether the exchange runs beside the computation: it may then take as long, and a tenth otherwise.
        use: makes a rung the one in use. Every rank calls it.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        position: int,
        compressor: Compressor,
        communicator: Communicator,
        numel: int,
        world_size: int,
        hides: bool,
        use: Callable[[Rung], None],
    ) -> None:
        self._rungs = list(rungs)
        self._position = position
        self._share = 1.0 if hides else _WAIT
        self._use = use
        sections = communicator.sections(world_size)
        self._dense = ring_bytes(4 * numel, world_size)
        self._bytes = []
        for rung in self._rungs:
            capacity = -(-compressor.capacity(numel, rung.density) // sections)
            payload = sections * rung.codec.nbytes(numel, capacity)
            self._bytes.append(communicator.nbytes(payload, world_size))

    @property
    def rung(self) -> Rung:
        """The one in use."""
        return self._rungs[self._position]

    def seconds(self, position: int, busy: float, link: float) -> float:
        """What an exchange would take: the work grows with the entries, and the rest with the bytes.

        Args:
            position: of a rung.
            busy: seconds it takes with the rung in use.
            link: seconds of a dense all-reduce of all gradients.
        """
        per_byte = link / self._dense
        work = max(0.0, busy - self._bytes[self._position] * per_byte)
        growth = self._rungs[position].density / self.rung.density
        return work * growth + self._bytes[position] * per_byte

    def move(self, compute: float, busy: float, link: float) -> bool:
        """Change to the heaviest rung that fits; whether it is another one. Every rank calls it alike.

        Args:
            compute: seconds of a step without exchange.
            busy, link: as for ``seconds``.
        """
        budget = self._share * compute
        fits = [self.seconds(i, busy, link) <= budget * _ROOM for i in range(len(self._rungs))]
        best = max((i for i, fit in enumerate(fits) if fit), default=0)
        if best == self._position or (best < self._position and busy <= budget * _OVER):
            return False
        self._position = best
        self._use(self.rung)
        return True
