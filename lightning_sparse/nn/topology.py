"""Moving blocks: from one block mask to another, with what an optimizer keeps for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, Optimizer, Rprop

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

    def apply(self, x: Tensor, beginning: float = 0.0) -> Tensor:
        """The new content of [old slots, ...]: in place if the number of slots stays, else a new tensor.

        Args:
            beginning: what new blocks are filled with.
        """
        fresh = self.fresh.to(x.device)
        if self.layout.count != x.shape[0]:
            moved = x.new_zeros(self.layout.count, *x.shape[1:])
            moved[: self.kept.numel()] = x[self.kept.to(x.device)]
            x = moved
        return x.index_fill_(0, fresh, beginning)


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

    State of the form [slots, *, *] is moved, and begins for new blocks as the optimizer would begin it; counters of
    steps stay.

    Raises:
        TypeError: an optimizer keeps state that is not of single parameters; nothing has moved.
    """
    slots = parameter.shape[0]
    optimizers = tuple(optimizers)
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                "BlockSparseLinear: expected optimizers with state of each parameter, got LBFGS, which keeps that of"
                " all in one vector: take another one, or leave the mask as it is"
            )
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() == parameter.dim() and value.shape[0] == slots:
                state[name] = moves.apply(value, _beginning(optimizer, name, parameter))
    grad = parameter.grad
    if slots == moves.layout.count:
        moves.apply(parameter)
    else:
        parameter.grad = None
        parameter.data = moves.apply(parameter.data)
    if grad is not None:
        parameter.grad = moves.apply(grad)


def _beginning(optimizer: Optimizer, name: str, parameter: nn.Parameter) -> float:
    """What a state's entries begin with: zero would keep Rprop from moving, and Adagrad's first steps too long."""
    for kind, kept, option in ((Rprop, "step_size", "lr"), (Adagrad, "sum", "initial_accumulator_value")):
        if isinstance(optimizer, kind) and name == kept:
            groups = optimizer.param_groups
            return next(float(group[option]) for group in groups if any(p is parameter for p in group["params"]))
    return 0.0
