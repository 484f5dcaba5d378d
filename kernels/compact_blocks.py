"""The torch half that the select ops share: pick and collect, one cache-sized block at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# torch splits an operation among threads from 32768 entries on. The barriers cost more than a strip's work, and far
# more where backward keeps the cores busy, so the dense operations stay just below; a block, with its values and mask,
# fits the second-level cache of one core.
STRIP = 32760
BLOCK = 8 * STRIP

Fill = Callable[[int, int, int, Tensor], Tensor]
"""`fill(piece, begin, end, out)`: these entries of a piece as fp32, where they lie already or in `out`."""


def compact_blocks(
    fill: Fill, bounds: Sequence[int], threshold: Tensor, capacity: int, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks among what `fill` gives, which is called once for every entry of every piece."""
    # |x| > the number below the threshold: at 0, no zero does, nor what a CPU that flushes denormals reads as zero.
    limit = float(torch.nextafter(threshold.clamp(min=0.0), torch.zeros(())))
    numel = bounds[-1]
    values = torch.zeros(capacity, dtype=torch.float32)  # [capacity]
    indices = torch.zeros(capacity, dtype=dtype)  # [capacity]
    size = min(BLOCK, -(-numel // 8) * 8)
    strip = size if torch.get_num_threads() == 1 else min(size, STRIP)
    scratch = torch.empty(size), torch.empty(strip), torch.empty(size, dtype=torch.bool)

    found: list[list[tuple[Tensor, Tensor]]] = [[], []]
    count = taken = 0
    # The entries from `start` on have the first claim on the capacity, those before it the second.
    for side, (low, high) in enumerate([(start, numel), (0, start)]):
        for begin in range(low, high, BLOCK):
            x, picked = _pick(fill, bounds, begin, min(begin + BLOCK, high), limit, scratch)
            if taken == capacity:
                count += sum(int(torch.count_nonzero(strip)) for strip in picked.split(STRIP))
                continue
            positions = _positions(picked)  # [picked] int64
            count += positions.numel()
            positions = positions[: capacity - taken]
            taken += positions.numel()
            found[side].append((x.index_select(0, positions), positions.add_(begin)))
    chunks = found[1] + found[0]
    if taken:
        torch.cat([chunk for chunk, _ in chunks], out=values[:taken])
        indices[:taken] = torch.cat([chunk for _, chunk in chunks])
    return values, indices, torch.tensor(count)


def parts(bounds: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(piece, begin in it, end in it) of the parts of pieces that make up entries begin to end of the vector."""
    piece = bisect_right(bounds, begin) - 1
    while begin < end:
        stop = min(end, bounds[piece + 1])
        if begin < stop:
            yield piece, begin - bounds[piece], stop - bounds[piece]
        begin, piece = stop, piece + 1


def _pick(
    fill: Fill, bounds: Sequence[int], begin: int, end: int, limit: float, scratch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The entries of a block, and where they are picked; both end at a multiple of 8."""
    x, magnitude, picked = scratch
    length, size = end - begin, magnitude.numel()
    padded = -(-length // 8) * 8
    pieces = list(parts(bounds, begin, end))
    in_place = len(pieces) == 1 and padded == length
    filled = []
    for low in range(0, length, size):
        high = min(low + size, length)
        entries = x[low:high]
        if in_place:
            piece, first, _ = pieces[0]
            entries = fill(piece, first + low, first + high, entries)
            filled.append(entries)
        else:
            for piece, first, last in parts(bounds, begin + low, begin + high):
                done = bounds[piece] + first - begin
                part = x[done : done + last - first]
                if (got := fill(piece, first, last, part)) is not part:
                    part.copy_(got)
        room = torch.abs(entries, out=magnitude[: high - low])
        # in two vectorised steps: torch compares into a mask entry by entry, three times slower
        picked[low:high].copy_(room.gt_(limit))
    picked[length:padded] = False
    # strips of one piece lie side by side, in the piece or in the scratch
    return filled[0].as_strided((length,), (1,)) if in_place else x[:padded], picked[:padded]


def _positions(picked: Tensor) -> Tensor:
    """Where `picked` is true, ascending; its size is a multiple of 8."""
    # Few words of 8 mask bytes have a true one, so most of the mask is read 8 entries at a time.
    words = picked.view(torch.int64)  # [size / 8]
    live = words.nonzero().view(-1)
    places = words[live].view(torch.bool).nonzero().view(-1)
    return live[places >> 3].mul_(8).add_(places & 7)
