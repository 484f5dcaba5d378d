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
            adaptive optimizers whose ranks pick entries of their own (``TopK``), and 1 otherwise.
        lr_scale: factor on the optimizer's learning rate while it steps, a positive number or a schedule of the
            optimizer's steps; None takes sqrt(world_size) for adaptive optimizers whose ranks agree on the entries
            (``WeightBlocks``) and no anchor step is given, and 1 otherwise. Weight decay that is multiplied by the
            learning rate, as AdamW's is, is scaled with it. Code that runs inside the step (``training_step``, unless
            gradients are accumulated) sees the scaled rate.
        overlap: let an exchange run during the next step, and merge it after that step.
        dense_below: parameters of fewer elements, and all vectors, are averaged densely; 0: none are. None takes 1024
            where ranks pick entries of their own, and 0 where they agree on them.

    Example:
        >>> Updates(every=4).every
        4
    """

    every: int = 1
    anchor_step: float | Schedule | None = None
    lr_scale: float | Schedule | None = None
    overlap: bool = False
    dense_below: int | None = None
    name: str = field(init=False, default="updates")

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Updates: every must be an integer of at least 1, got {self.every!r}")
        for name in ("anchor_step", "lr_scale"):
            x = getattr(self, name)
            is_number = isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf
            if not (x is None or callable(x) or is_number):
                raise ValueError(f"Updates: {name} must be positive, got {x!r}: give a number, a schedule or None")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"Updates: overlap must be True or False, got {self.overlap!r}")
        if self.dense_below is not None:
            check_dense_below("Updates", self.dense_below)
