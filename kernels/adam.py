"""The update of Adam, as kernels and foreach operations compute it: each operation is rounded to fp32 on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.kernels.jit import jit


class Adam(NamedTuple):
    """The numbers of an update ``first_scale * m / (sqrt(second_scale * v) + eps) + decay * w``."""

    beta1: float
    beta2: float
    first_scale: float
    second_scale: float
    eps: float
    decay: float

    def numbers(self) -> tuple[float, ...]:
        """What the kernels take: the two shares of a new gradient are rounded to fp32 as they stand."""
        return (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, *self[2:])


def moved(
    wide: list[Tensor], gradients: Sequence[Tensor], firsts: list[Tensor], seconds: list[Tensor], adam: Adam
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The update from fp32 weights and the moments moved on, [numel of cut] fp32 each; nothing is changed in place."""
    beta1, share1, beta2, share2, first_scale, second_scale, eps, decay = adam.numbers()
    g = [x.float() for x in gradients]
    # products apart from sums: `add` with a factor would round the two once
    m = torch._foreach_mul(firsts, beta1)
    torch._foreach_add_(m, torch._foreach_mul(g, share1))
    squares = torch._foreach_mul(g, g)
    torch._foreach_mul_(squares, share2)
    v = torch._foreach_mul(seconds, beta2)
    torch._foreach_add_(v, squares)
    below = torch._foreach_mul(v, second_scale)
    torch._foreach_sqrt_(below)
    torch._foreach_add_(below, eps)
    update = torch._foreach_mul(m, first_scale)
    torch._foreach_div_(update, below)
    torch._foreach_add_(update, torch._foreach_mul(wide, decay))
    return list(update), list(m), list(v)


@jit
def moment(x, new, beta, share):  # type: ignore[no-untyped-def]
    """The running mean x with a share of what is new."""
    return beta * x + share * new
