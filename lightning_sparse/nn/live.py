"""Live: which rows, columns and tiles of an operand hold anything but zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sparse.kernels.block_layout import BlockLayout

# rows of matrices, and images, that are looked at first, spread evenly: where they hold nearly everything, nothing else
# is read
_SAMPLES = (32, 4)
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Live:
    """What of an operand [m, n, ...] is not all zero.

    Args:
        rows, columns: ascending, [k] int64, or None for all of them.
        shape: m and n.
        tiles: where the tiles lie that are not all zero, or None where next to all are, or nobody asked.
    """

    rows: Tensor | None
    columns: Tensor | None
    shape: tuple[int, int]
    tiles: BlockLayout | None = None

    @property
    def row_count(self) -> int:
        return self.shape[0] if self.rows is None else len(self.rows)

    @property
    def column_count(self) -> int:
        return self.shape[1] if self.columns is None else len(self.columns)

    @property
    def density(self) -> float:
        """Fraction of the operand that lies in live rows and in live columns."""
        return self.row_count * self.column_count / max(1, self.shape[0] * self.shape[1])

    @property
    def tile_density(self) -> float:
        """Fraction of the operand that lies in live tiles."""
        return 1.0 if self.tiles is None else self.tiles.weights / (self.shape[0] * self.shape[1])


def find_live(x: Tensor, tile: int | None = None) -> Live:
    """What is live in x, [m, n, ...]; NaN and infinity are, and -0 is not.

    Where a sample of the rows shows that there is next to nothing to skip, the answer is everything, without a full
    pass.

    Args:
        tile: side of the tiles to look for in a matrix; None looks for none.
    """
    shape = (x.shape[0], x.shape[1])
    if x.numel() == 0:
        return Live(None, None, shape)
    enough = _SAMPLES[x.dim() > 2]
    if len(x) > 2 * enough:
        sample = _mask(x[:: len(x) // enough])
        in_lines = _any_of_last(sample).float().mean() * _any_of_first(sample).float().mean()
        in_tiles = 1.0 if tile is None else F.max_pool1d(sample.float(), tile, ceil_mode=True).mean()
        if min(float(in_lines), float(in_tiles)) > _NEARLY_ALL:
            return Live(None, None, shape)
    mask = _mask(x)
    rows, columns = _any_of_last(mask), _any_of_first(mask)
    tiles = None if tile is None else _tiles(mask, tile)
    return Live(_selected(rows), _selected(columns), shape, tiles)


def take(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """x at some of its rows and columns, without a copy where all are taken."""
    if rows is not None:
        x = x.index_select(0, rows)
    return x if columns is None else x.index_select(1, columns)


def put(part: Tensor, rows: Tensor | None, columns: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Zeros of a shape, with ``part`` at some of its rows and columns."""
    if rows is None and columns is None:
        return part
    out = part.new_zeros(shape)
    if rows is None:
        return out.index_copy_(1, columns, part)  # type: ignore[arg-type]
    if columns is None:
        return out.index_copy_(0, rows, part)
    out[rows[:, None], columns] = part
    return out


def both(first: Tensor | None, second: Tensor | None, size: int) -> Tensor | None:
    """What two ascending selections of the same ``size`` places share."""
    if first is None or second is None:
        return second if first is None else first
    held = torch.zeros(size, dtype=torch.bool, device=first.device).index_fill_(0, first, True)
    return second[held[second]]


def _mask(x: Tensor) -> Tensor:
    """[m, n] bool: whether anything is not 0."""
    mask = (x != 0).contiguous()
    return mask if mask.dim() == 2 else _any_of_last(mask.flatten(2))


def _any_of_last(mask: Tensor) -> Tensor:
    if mask.shape[-1] % 8:
        return mask.any(-1)
    # eight at a time
    return (mask.view(torch.int64) != 0).any(-1)


def _any_of_first(mask: Tensor) -> Tensor:
    # a maximum of bytes is many times faster than `any` over the first dimension
    return mask.view(torch.uint8).amax(0) != 0


def _selected(live: Tensor) -> Tensor | None:
    return None if bool(live.all()) else live.nonzero().view(-1)


def _tiles(mask: Tensor, tile: int) -> BlockLayout | None:
    rows = -(-mask.shape[0] // tile)
    padded = F.pad(mask, (0, -mask.shape[1] % tile, 0, rows * tile - mask.shape[0])).view(rows, tile, -1)
    live = _any_of_last(padded.view(torch.uint8).amax(1).view(torch.bool).view(rows, -1, tile))
    if float(live.float().mean()) > _NEARLY_ALL:
        return None
    return BlockLayout.of(live, mask.shape[0], mask.shape[1], tile)
