"""Live: which rows and columns of an operand hold anything but zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# rows that are looked at first, spread evenly: where they hold nearly all columns, nothing else is read
_SAMPLE = 32
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Live:
    """The rows and columns of an operand that are not all zero.

    Args:
        rows, columns: ascending, [k] int64, or None for all of them.
        density: fraction of the operand that lies in both.
    """

    rows: Tensor | None
    columns: Tensor | None
    density: float


ALL = Live(None, None, 1.0)


def find_live(x: Tensor) -> Live:
    """The live rows and columns of x, [m, n, ...]; NaN and infinity are live, and -0 is zero.

    Where a sample of the rows shows that there is next to nothing to skip, the answer is `ALL` without a full pass.
    """
    if x.numel() == 0:
        return ALL
    if len(x) > 2 * _SAMPLE:
        rows, columns = _any(x[:: len(x) // _SAMPLE])
        if float(rows.float().mean() * columns.float().mean()) > _NEARLY_ALL:
            return ALL
    rows, columns = _any(x)
    row_count, column_count = int(rows.sum()), int(columns.sum())
    return Live(
        None if row_count == len(rows) else rows.nonzero().view(-1),
        None if column_count == len(columns) else columns.nonzero().view(-1),
        row_count * column_count / (len(rows) * len(columns)),
    )


def take(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """x at some of its rows and columns, without a copy where all are taken."""
    if rows is not None:
        x = x.index_select(0, rows)
    return x if columns is None else x.index_select(1, columns)


def put(part: Tensor, rows: Tensor | None, columns: Tensor | None, shape: torch.Size) -> Tensor:
    """Zeros of a shape, with ``part`` at some of its rows and columns."""
    if rows is None and columns is None:
        return part
    out = part.new_zeros(shape)
    if columns is None:
        return out.index_copy_(0, rows, part)
    if rows is None:
        return out.index_copy_(1, columns, part)
    out[rows[:, None], columns] = part
    return out


def both(first: Tensor | None, second: Tensor | None, size: int) -> Tensor | None:
    """What two ascending selections of the same ``size`` places share."""
    if first is None or second is None:
        return second if first is None else first
    held = torch.zeros(size, dtype=torch.bool, device=first.device).index_fill_(0, first, True)
    return second[held[second]]


def _any(x: Tensor) -> tuple[Tensor, Tensor]:
    """[m] and [n] bool: whether a row, and a column, has an entry other than 0."""
    live = (x != 0).contiguous()
    if live.dim() > 2:
        live = _any_of_last(live.flatten(2))
    return _any_of_last(live), live.view(torch.uint8).amax(0) > 0


def _any_of_last(live: Tensor) -> Tensor:
    # eight at a time
    words = live.view(torch.int64) if live.shape[-1] % 8 == 0 else live.view(torch.uint8)
    return words.amax(-1) != 0 if words.dtype == torch.uint8 else (words != 0).any(-1)
