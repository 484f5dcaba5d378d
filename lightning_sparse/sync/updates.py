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

    Sources: the outer step is that of Douillard et al., "DiLoCo", https://arxiv.org/abs/2311.08105, Algorithm 1 (there
    eta is the outer learning rate, 0.7, and mu is 0.9).

    Validation, test, checkpoints and the end of ``fit`` see the anchor.

    Args:
        every: optimizer steps between two exchanges, at least 1.
        anchor_step: eta, a positive number or a schedule of the exchange's count; None takes sqrt(world_size) for
            adaptive optimizers whose ranks pick entries of their own (``TopK``), and 1 otherwise.
        lr_scale: factor on the optimizer's steps, as if on its learning rates: a positive number or a schedule of the
            steps; None measures one for each parameter, from 1 to sqrt(world_size) (``Agreement``), for adaptive
            optimizers whose ranks agree on the entries (``WeightBlocks``) if no anchor step is given, and is 1
            otherwise. Takes a copy of the weights. Weight decay in the optimizer's step is scaled with it.
        outer_momentum: mu in [0, 1), of the means (DiLoCo); needs entries that ranks agree on. ``m = mu * m + mean``,
            and the anchor and the weights move by ``mean + mu * m``, or by ``m``, instead of ``mean``.
        nesterov: the first of the two forms.
        decay: in (0, 1], what is kept, at each exchange, of the progress that is not yet shared:
            ``p = x + decay * (p - x)`` behind it (SparseLoCo's error feedback). 1 loses nothing.
        overlap: let an exchange run during the next step, and merge it after that step. It hides the exchange, and
            costs loss.
        dense_below: parameters of fewer elements, and all vectors, are averaged densely; 0: none are. None takes 1024
            where ranks pick entries of their own, and 0 where they agree on them.

    Example:
        >>> Updates(every=4).every
        4
    """

    every: int = 1
    anchor_step: float | Schedule | None = None
    lr_scale: float | Schedule | None = None
    outer_momentum: float = 0.0
    nesterov: bool = True
    decay: float = 1.0
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
        for name in ("overlap", "nesterov"):
            if not isinstance(x := getattr(self, name), bool):
                raise ValueError(f"Updates: {name} must be True or False, got {x!r}")
        mu, decay = self.outer_momentum, self.decay
        if isinstance(mu, bool) or not isinstance(mu, (int, float)) or not 0 <= mu < 1:
            raise ValueError(f"Updates: outer_momentum must be in [0, 1), got {mu!r}")
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise ValueError(f"Updates: decay must be in (0, 1], got {decay!r}")
        if self.dense_below is not None:
            check_dense_below("Updates", self.dense_below)
