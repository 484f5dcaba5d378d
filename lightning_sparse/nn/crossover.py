"""Crossovers: up to which density a layer's sparse path is the faster one, measured once for each shape.

    case = Case.of("BlockSparseLinear", x, rounded_up(rows), out_features, in_features, block)
    if switch.takes_sparse(density, crossover(case, make_dense_run, make_sparse_run)):
        ...

Results are kept for the process. Which path runs can change the last bits of a result, so `pinned` fixes the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.timing import time_alternating

Run = Callable[[], object]

DENSITIES = (1 / 16, 1 / 4, 1 / 2, 1.0)
_REPEATS = 3
# seconds of timed runs of one path at one density
_BUDGET = 0.5


@dataclass(frozen=True)
class Case:
    """What a crossover is measured for.

    Args:
        layer: name of the layer, and of its pass where passes are measured apart.
        device: the hardware, `cpu` or the name of the GPU, which `Case.of` fills in.
        dtype: that of the arithmetic.
        threads: CPU threads, as timings depend on them.
        shape: every size that the time depends on, the density left out.
        place: where to measure; cases that differ in it only are one.
    """

    layer: str
    device: str
    dtype: torch.dtype
    threads: int
    shape: tuple[int, ...]
    place: torch.device = field(default_factory=lambda: torch.device("cpu"), compare=False)

    @classmethod
    def of(cls, layer: str, like: Tensor, *shape: int) -> Case:
        """The case of a layer on the device, and with the dtype, of a tensor."""
        device = torch.cuda.get_device_name(like.device) if like.is_cuda else like.device.type
        return cls(layer, device, like.dtype, torch.get_num_threads(), shape, like.device)


@dataclass(frozen=True)
class Crossover:
    """What was measured for one case.

    Args:
        density: up to which the sparse path is faster; 0 if never, 1 if always.
        dense_seconds: of the dense path.
        sparse_seconds: (density, seconds) of the sparse path, as far as it was measured.
    """

    density: float
    dense_seconds: float = 0.0
    sparse_seconds: tuple[tuple[float, float], ...] = ()


NEVER, ALWAYS = Crossover(0.0), Crossover(1.0)
_known: dict[Case, Crossover] = {}
_pinned: Crossover | None = None


def crossover(
    case: Case,
    dense: Callable[[], Run],
    sparse: Callable[[float], Run],
    densities: tuple[float, ...] = DENSITIES,
) -> Crossover:
    """The crossover of a case: measured when it is first asked for, then remembered.

    Measuring runs both paths in turns, at one density after the other, until the sparse path is the slower one, and
    draws the line between the last two densities. Gradients are on and autocast is off meanwhile. While a CUDA graph is
    captured nothing can be measured, and an unknown case answers with `NEVER`.

    Args:
        case: names what is measured.
        dense: makes a run of the dense path, on inputs of its own; called only where measuring begins.
        sparse: makes a run of the sparse path at a density.
        densities: ascending, in (0, 1].
    """
    if _pinned is not None:
        return _pinned
    if case not in _known:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return NEVER
        # as in training, wherever the layer is first called
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(case.place.type, enabled=False):
            _known[case] = measure(case.place, dense(), sparse, densities)
    return _known[case]


def measure(
    device: torch.device, dense: Run, sparse: Callable[[float], Run], densities: tuple[float, ...] = DENSITIES
) -> Crossover:
    """As `crossover`, measured now and not remembered."""
    points: list[tuple[float, float]] = []
    # at density 0 nothing is left to do: the line to the first point starts at no time
    below, gain, dense_seconds = 0.0, 0.0, 0.0
    for density in densities:
        seconds = time_alternating({"dense": dense, "sparse": sparse(density)}, _REPEATS, device, _BUDGET)
        dense_seconds = seconds["dense"]
        points.append((density, seconds["sparse"]))
        gained = dense_seconds - seconds["sparse"]
        if gained <= 0:
            # a first density that does not gain leaves nothing to draw a line from
            reached = below + (density - below) * gain / (gain - gained) if below else 0.0
            return Crossover(reached, dense_seconds, tuple(points))
        below, gain = density, gained
    return Crossover(below, dense_seconds, tuple(points))


def known() -> dict[Case, Crossover]:
    """A copy of all crossovers that this process has measured."""
    return dict(_known)


def forget() -> None:
    """Drops all measured crossovers: the next use of each case measures it again."""
    _known.clear()


@contextmanager
def pinned(density: float) -> Iterator[None]:
    """Takes `density` for every crossover, and measures nothing, until the block ends.

    With 1 all layers take their sparse path, with 0 their dense one.

    Raises:
        ValueError: a density outside [0, 1].
    """
    if not 0 <= density <= 1:
        raise ValueError(f"pinned: density must be in [0, 1], got {density}")
    global _pinned
    before, _pinned = _pinned, Crossover(density)
    try:
        yield
    finally:
        _pinned = before


class Switch:
    """Chooses between two paths, and changes its mind only when a density has left a band around the crossover.

    Example:
        >>> switch = Switch(margin=0.1)
        >>> [switch.takes_sparse(density, Crossover(0.5)) for density in (0.4, 0.52, 0.6, 0.48, 0.44)]
        [True, True, False, False, True]
    """

    def __init__(self, margin: float = 0.1) -> None:
        if not 0 <= margin < 1:
            raise ValueError(f"Switch: margin must be in [0, 1), got {margin}")
        self.margin = margin
        self._sparse: bool | None = None

    def takes_sparse(self, density: float, found: Crossover) -> bool:
        """True where the sparse path should run; the first call has no band, nor have crossovers at 0 and 1."""
        if found.density in (0.0, 1.0):
            self._sparse = found.density == 1.0
        elif self._sparse is None:
            self._sparse = density <= found.density
        elif self._sparse:
            self._sparse = density <= found.density * (1 + self.margin)
        else:
            self._sparse = density <= found.density * (1 - self.margin)
        return self._sparse


def rounded_up(size: int) -> int:
    """The next power of two, for sizes that change from call to call, such as rows of a batch."""
    return 1 << max(0, size - 1).bit_length()
