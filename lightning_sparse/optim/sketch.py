"""Sketch: the squared norm of a mean that nobody forms, from a short vector of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.optim.norms import by_group
from lightning_sparse.random import Draw

WIDTH = 509
"""Entries of a sketch."""
# the period of the signs; both are prime, so that entries that meet in a sketch have signs of their own
_PERIOD = 4093


def sketch(vectors: Sequence[Tensor], owner: Sequence[int], groups: int, draw: Draw) -> Tensor:
    """Sums, with random signs, of the blocks of WIDTH entries that flat vectors are cut into: [groups, WIDTH] float32.

    Linear in the vectors, so the mean over ranks of their sketches is the sketch of their mean, if they draw alike. Its
    squared norm is that of the vectors, without bias, with a standard deviation of sqrt(2 / WIDTH) = 6 % of it, unless
    a few entries rule that fall on the same place. Reads each vector, writes one of its size, and reads that.

    Args:
        vectors: [n] each, of any float type.
        owner: the group of each.
        groups: how many there are.
        draw: of the signs.

    Source: Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments", STOC 1996, section
        2.2; the sign of an entry is here the product of one of its block and one of its place in a period of 4093.
    """
    if not vectors:
        return torch.zeros(groups, WIDTH)
    blocks = [-(-x.numel() // WIDTH) for x in vectors]
    bits = draw.bits(_PERIOD + sum(blocks), vectors[0].device)
    signs = (bits >> 31).float().mul_(2).sub_(1)
    period, by_block = signs[:_PERIOD], signs[_PERIOD:].split(blocks)
    rows = torch.zeros(len(vectors), WIDTH, device=signs.device)
    for row, x, sign in zip(rows, vectors, by_block, strict=True):
        signed = _with_signs(x, period)
        whole = x.numel() // WIDTH
        if whole:
            row.addmv_(signed[: whole * WIDTH].view(whole, WIDTH).T, sign[:whole])
        if rest := x.numel() % WIDTH:
            row[:rest].addcmul_(signed[whole * WIDTH :], sign[whole])
    return by_group(rows, owner, groups)


def _with_signs(x: Tensor, period: Tensor) -> Tensor:
    """``x`` times signs that repeat: [n] float32."""
    n, whole = x.numel(), x.numel() // _PERIOD * _PERIOD
    out = torch.empty(n, device=x.device)
    torch.mul(x[:whole].view(-1, _PERIOD), period, out=out[:whole].view(-1, _PERIOD))
    torch.mul(x[whole:], period[: n - whole], out=out[whole:])
    return out
