"""What an exchange brought, added to the anchor and to this rank's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.block import Block, as_block
from lightning_sparse.job import Outcome
from lightning_sparse.sync.group import Group
from lightning_sparse.sync.updates import Updates
from lightning_sparse.vector import SparseVector


@torch.no_grad()
def merge(group: Group, outcome: Outcome, config: Updates, agreed: bool) -> None:
    """``x += step ; p += step - picked`` where something was picked, and what ``config`` asks for beyond.

    Args:
        group: whose weights and anchor are changed.
        outcome: of its last exchange, finite.
        config: the outer momentum, its form, and the decay.
        agreed: whether the mean's parts are sections of one block that all ranks have picked.
    """
    picked = outcome.picked
    eta = float(group.eta(picked.job.step))
    # the names of the job, not of the group: the optimizer may have got more parameters since
    sparse, dense = list(picked.job.names), list(picked.job.dense_names)
    if outcome.mean is not None and picked.sent is not None:
        weights, anchors = group.views(sparse), group.anchor.of(sparse)
        parts, factor = outcome.mean.parts, eta * outcome.mean.scale
        if agreed or config.outer_momentum:
            block = as_block(picked.sent)
            blocks = block.sections(len(parts)) if agreed else [block]
            totals = [part.values for part in parts] if agreed else [_sum(parts)]
            for block, total in zip(blocks, totals, strict=True):
                if config.outer_momentum:
                    total = _with_momentum(total, block, group.anchor.outer(sparse), config)
                step = total if factor == 1 else total * factor
                block.with_values(step).add_to(anchors)
                # one sum, as each would be rounded in half-precision weights
                block.with_values(step - block.values).add_to(weights)
        else:
            for part in parts:
                part.add_to(anchors, alpha=factor)
                part.add_to(weights, alpha=factor)
            picked.sent.add_to(weights, alpha=-1.0)
        if (rejected := outcome.mean.rejected) is not None:
            rejected.add_to(weights)
        if config.decay != 1:
            for weight, anchor in zip(weights, anchors, strict=True):
                _decay(weight, anchor, config.decay)
    names = [*([] if outcome.mean is not None else sparse), *dense]
    views, anchors = group.views(names), group.anchor.of(names)
    sizes = [view.numel() for view in views]
    steps = list(outcome.tail.split(sizes))
    if config.outer_momentum:
        steps = [_outer_step(x, buffer, config) for x, buffer in zip(steps, group.anchor.outer(names), strict=True)]
    for view, anchor, step, sent in zip(views, anchors, steps, picked.tail.split(sizes), strict=True):
        anchor.add_(step, alpha=eta)
        view.add_(step, alpha=eta).sub_(sent)
    if config.decay != 1:
        for view, anchor in zip(views, anchors, strict=True):
            _decay(view, anchor, config.decay)


def _outer_step(mean: Tensor, momentum: Tensor, config: Updates) -> Tensor:
    """The step that heavy-ball or Nesterov momentum makes of a mean; ``momentum`` is brought up to date in place."""
    momentum.mul_(config.outer_momentum).add_(mean)
    return mean + config.outer_momentum * momentum if config.nesterov else momentum.clone()


def _sum(parts: list[SparseVector]) -> Tensor:
    """Of the values of parts that have the same entries."""
    total = parts[0].values.clone()
    for part in parts[1:]:
        total += part.values
    return total


def _with_momentum(mean: Tensor, block: Block, buffers: Sequence[Tensor], config: Updates) -> Tensor:
    momentum = block.read(buffers)
    step = _outer_step(mean, momentum, config)
    block.with_values(momentum).write_to(buffers)
    return step


def _decay(weight: Tensor, anchor: Tensor, keep: float) -> None:
    """``p = x + keep * (p - x)``: what is still to be shared is forgotten slowly."""
    weight.copy_(anchor + keep * (weight.float() - anchor))
