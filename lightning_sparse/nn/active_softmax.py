"""Cross-entropy over the active rows of an output layer whose rows may lie on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.nn.first_order import first_order
from lightning_sparse.nn.work import Work
from lightning_sparse.protocols import Transport


@dataclass(frozen=True)
class Active:
    """The rows of this rank that take part in a step, for all samples of all ranks.

    Args:
        rows: [u] int64, ascending, unique; None for all rows.
        target: [b] int64, position of each sample's target among the rows; -1 where another rank owns it.
        offset: added to the logits, [u], or [b, u] where samples differ (minus infinity leaves a row out), or None.
    """

    rows: Tensor | None
    target: Tensor
    offset: Tensor | None


def active_cross_entropy(
    x: Tensor,
    gathered: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: Active,
    transport: Transport | None,
    work: Work,
    sparse: bool,
) -> Tensor:
    """Cross-entropy of this rank's samples over the active rows of all ranks: [b] of the weight's dtype.

    The gradients of weight and bias are those of the mean of all ranks' losses, as DDP makes them for what every rank
    holds; the gradient of ``x`` is that of this rank's loss alone. Every rank must call it, and its backward pass.

    Args:
        x: this rank's samples, [b, h], in the weight's dtype.
        gathered: the samples of all ranks, in rank order, [w b, h].
        weight: rows of this rank, [n, h].
        bias: [n], or None.
        transport: between the ranks; None for one.
        sparse: whether gradients of weight and bias are sparse COO tensors of the active rows.
    """
    return _ActiveCrossEntropy.apply(x, gathered, weight, bias, active, transport, work, sparse)


class _ActiveCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gathered: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        active: Active,
        transport: Transport | None,
        work: Work,
        sparse: bool,
    ) -> Tensor:
        rows, target = active.rows, active.target
        chosen = weight if rows is None else weight.index_select(0, rows)  # [u, h]
        if bias is None:
            logits = gathered @ chosen.t()
        else:
            logits = torch.addmm(bias if rows is None else bias.index_select(0, rows), gathered, chosen.t())
        if active.offset is not None:
            logits += active.offset
        own = target >= 0
        aim = (
            logits.gather(1, target.clamp(min=0)[:, None]).squeeze(1) if logits.numel() else logits.new_zeros(len(own))
        )
        partial = torch.stack([torch.logsumexp(logits, 1), torch.where(own, aim, 0.0)])  # [2, w b]
        total, aim = _combined(partial, transport)
        work.forward.add(len(gathered), chosen.numel(), weight.numel())
        ctx.save_for_backward(gathered, chosen, weight, logits, total)
        ctx.active, ctx.transport, ctx.work, ctx.sparse = active, transport, work, sparse
        return _own(total - aim, transport)

    @staticmethod
    @first_order("LSHLinear", "nn.Linear")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gathered, chosen, weight, logits, total = ctx.saved_tensors
        transport, active = ctx.transport, ctx.active
        world_size = 1 if transport is None else transport.world_size
        every = grad if transport is None else transport.all_gather(grad.contiguous()).view(-1)  # [w b]
        delta = (logits - total[:, None]).exp_().mul_(every[:, None])  # [w b, u]
        own = active.target >= 0
        delta[own.nonzero().view(-1), active.target[own]] -= every[own]
        dx = delta @ chosen
        if transport is not None:
            dx = transport.all_to_all(dx).view(world_size, len(grad), -1).sum(0)
        dweight = (delta.t() @ gathered).div_(world_size) if ctx.needs_input_grad[2] else None
        dbias = delta.sum(0).div_(world_size) if ctx.needs_input_grad[3] else None
        ctx.work.input_gradient.add(len(gathered), chosen.numel(), weight.numel())
        if dweight is not None:
            ctx.work.weight_gradient.add(len(gathered), chosen.numel(), weight.numel())
        if active.rows is not None or ctx.sparse:
            rows = torch.arange(len(weight), device=weight.device) if active.rows is None else active.rows
            dweight, dbias = (_scattered(d, rows, len(weight), ctx.sparse) for d in (dweight, dbias))
        return dx, None, dweight, dbias, None, None, None, None


def _combined(partial: Tensor, transport: Transport | None) -> Tensor:
    """Log of the normaliser, and logit of the target, of all samples over all ranks: [2, w b], equal on all ranks."""
    if transport is None:
        return partial
    parts = transport.all_gather(partial.view(-1)).view(-1, *partial.shape)  # [w, 2, w b]
    return torch.stack([torch.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0)])


def _own(x: Tensor, transport: Transport | None) -> Tensor:
    return x if transport is None else x.view(transport.world_size, -1)[transport.rank].clone()


def _scattered(d: Tensor | None, rows: Tensor, numel: int, sparse: bool) -> Tensor | None:
    """The gradient of all rows from that of some."""
    if d is None:
        return None
    shape = (numel, *d.shape[1:])
    if sparse:
        return torch.sparse_coo_tensor(rows[None], d, shape, is_coalesced=True, check_invariants=False)
    return d.new_zeros(shape).index_copy_(0, rows, d)
