"""Updates: every rank steps its own optimizer, and shares its progress against a common anchor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_sparse.protocols import Schedule
from lightning_sparse.sync.flat import check_dense_below


@dataclass(frozen=True)
class Updates:
    """Average progress against an anchor that is bit-equal on all ranks. Right for adaptive optimizers.

    With own weights p, anchor x and eta the anchor step, every ``every`` optimizer steps::

        u = p - x ; picked = compress(u) ; mean = average over ranks of picked
        x += eta * mean ; p += eta * mean - picked

    Validation, test, checkpoints and the end of ``fit`` see the anchor.

    Args:
        every: optimizer steps between two exchanges, at least 1.
        anchor_step: eta, a positive number or a schedule of the exchange's count; None takes sqrt(world_size) for
            adaptive optimizers and 1 for plain or momentum SGD.
        overlap: let an exchange run during the next step, and merge it after that step.
        dense_below: parameters of fewer elements, and all vectors, are averaged densely; 0: none are.

    Example:
        >>> Updates(every=4).every
        4
    """

    every: int = 1
    anchor_step: float | Schedule | None = None
    overlap: bool = True
    dense_below: int = 1024
    name: str = field(init=False, default="updates")

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Updates: every must be an integer of at least 1, got {self.every!r}")
        step = self.anchor_step
        is_number = isinstance(step, (int, float)) and not isinstance(step, bool) and 0 < step < math.inf
        if not (step is None or callable(step) or is_number):
            raise ValueError(f"Updates: anchor_step must be positive, got {step!r}: give a number, a schedule or None")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"Updates: overlap must be True or False, got {self.overlap!r}")
        check_dense_below("Updates", self.dense_below)
