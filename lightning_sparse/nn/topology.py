"""Moving blocks: from one block mask to another, with what an optimizer keeps for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.kernels.block_layout import BlockLayout


@dataclass(frozen=True)
class Moves:
    """How storage changes from one layout to the next: blocks that stay keep their slots, unless storage shrinks.

    Args:
        layout: the new one.
        kept: [slots] int64: slots whose content is taken over, in the order they take.
        fresh: [new] int64: slots, in the new storage, of blocks that begin at zero.
    """

    layout: BlockLayout
    kept: Tensor
    fresh: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """The new content of [old slots, ...]: in place if the number of slots stays, else a new tensor."""
        fresh = self.fresh.to(x.device)
        if self.layout.count != x.shape[0]:
            moved = x.new_zeros(self.layout.count, *x.shape[1:])
            moved[: self.kept.numel()] = x[self.kept.to(x.device)]
            x = moved
        return x.index_fill_(0, fresh, 0)


def plan_moves(layout: BlockLayout, mask: Tensor) -> Moves:
    """New blocks, in row-major order, take the slots of dropped ones, then slots at the end.

    With fewer blocks than before, slots that stay empty are closed up.
    """
    mask = mask.cpu()
    freed = (~mask[layout.rows, layout.cols]).nonzero().view(-1)
    new_rows, new_cols = (mask & ~layout.mask).nonzero(as_tuple=True)
    rows, cols = layout.rows.clone(), layout.cols.clone()
    reused = min(freed.numel(), new_rows.numel())
    rows[freed[:reused]], cols[freed[:reused]] = new_rows[:reused], new_cols[:reused]
    kept = torch.ones(layout.count, dtype=torch.bool)
    kept[freed[reused:]] = False
    fresh = torch.zeros(layout.count, dtype=torch.bool)
    fresh[freed[:reused]] = True
    rows = torch.cat([rows[kept], new_rows[reused:]])
    cols = torch.cat([cols[kept], new_cols[reused:]])
    begun = torch.cat([fresh[kept], torch.ones(new_rows.numel() - reused, dtype=torch.bool)])
    moved = BlockLayout(rows, cols, layout.out_features, layout.in_features, layout.block)
    return Moves(moved, kept.nonzero().view(-1), begun.nonzero().view(-1))


@torch.no_grad()
def move_parameter_(parameter: nn.Parameter, moves: Moves, optimizers: Iterable[Optimizer]) -> None:
    """Moves a parameter [slots, block, block], its gradient and its optimizer state; it stays the same object.

    State of the form [slots, *, *] is moved, and zero for new blocks; counters of steps stay.
    """
    slots = parameter.shape[0]
    resized = slots != moves.layout.count
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() == parameter.dim() and value.shape[0] == slots:
                state[name] = moves.apply(value)
    if resized:
        parameter.grad = None
        parameter.data = moves.apply(parameter.data)
    else:
        moves.apply(parameter)
        if parameter.grad is not None:
            moves.apply(parameter.grad)
