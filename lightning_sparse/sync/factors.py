"""The two factors of the updates exchange: on the anchor's steps, and on those of the optimizer."""

from __future__ import annotations

import math

from lightning_sparse.protocols import Schedule
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant
from lightning_sparse.sync.agreement import Agreement
from lightning_sparse.sync.updates import Updates


def factors(config: Updates, name: str, reducer: Reducer, is_linear: bool) -> tuple[Schedule, Schedule | Agreement]:
    """The anchor step and the scale of steps for one optimizer.

    Args:
        config: what was asked for.
        name: of the optimizer's streams.
        reducer: averages what is measured.
        is_linear: whether the optimizer's step is linear in the gradient.
    """
    eta, agreed = config.anchor_step, reducer.compressor.agreed
    if config.lr_scale is not None:
        scale: Schedule | Agreement = _schedule(config.lr_scale)
    elif agreed and not is_linear and eta is None:
        scale = Agreement(name, reducer)
    else:
        # whoever gives an anchor step has put the factor there
        scale = constant(1.0)
    if eta is None:
        # local Adam divides by the noise of one rank's gradient, dense Adam by that of the mean
        eta = 1.0 if agreed or is_linear else math.sqrt(reducer.transport.world_size)
    return _schedule(eta), scale


def _schedule(value: float | Schedule) -> Schedule:
    return value if callable(value) else constant(float(value))
