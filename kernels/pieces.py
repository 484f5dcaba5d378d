"""A flat vector as a list of pieces, one contiguous 1-D tensor a parameter: checks, and tables for kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

# The kernels branch on these codes; all arithmetic is in fp32.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def check_pieces(name: str, pieces: Sequence[Tensor], device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    """Raises unless every piece is a contiguous 1-D tensor on `device`, of one of `dtypes`."""
    for position, piece in enumerate(pieces):
        if piece.dtype not in dtypes:
            expected = ", ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"{name}[{position}] must be one of {expected}, got {piece.dtype}")
        if piece.dim() != 1 or not piece.is_contiguous():
            raise ValueError(f"{name}[{position}] must be 1-D and contiguous, got shape {tuple(piece.shape)}")
        if piece.device != device:
            raise ValueError(f"{name}[{position}] must be on {device} like the rest, got {piece.device}")


def check_vectors(vectors: Sequence[Tensor]) -> torch.device:
    """The device of all pieces, the CPU's if there are none; raises unless they are what an op reads."""
    device = vectors[0].device if vectors else torch.device("cpu")
    check_pieces("vectors", vectors, device, list(KINDS))
    return device


def check_payload(values: Tensor, indices: Tensor) -> None:
    """Raises unless [k] fp32 values have [k] int32 or int64 indices beside them, on one device."""
    check_pieces("values", [values], values.device, [torch.float32])
    check_pieces("indices", [indices], values.device, [torch.int32, torch.int64])
    if values.numel() != indices.numel():
        raise ValueError(f"values and indices must have one size, got {values.numel()} and {indices.numel()}")


def within(indices: Tensor, numel: int) -> Tensor:
    """Which indices are those of entries of a vector: [k] bool."""
    inside = indices >= 0
    # a bound that the indices' type cannot hold would be cut off in the comparison
    return inside if numel > torch.iinfo(indices.dtype).max else inside & (indices < numel)


def touched(pieces: Sequence[Tensor], indices: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """(piece, positions among the indices, entries of the piece) wherever there are some; the host reads the cuts.

    Args:
        indices: [k] of the pieces' concatenation, ascending, all of them within.
    """
    bounds = bounds_of(pieces)
    dtype = index_dtype(bounds[-1])
    cuts = torch.searchsorted(indices.to(dtype), torch.tensor(bounds, dtype=dtype, device=indices.device)).tolist()
    for piece, base, (low, high) in zip(pieces, bounds, pairwise(cuts), strict=False):
        if low < high:
            at = indices[low:high]
            yield piece, slice(low, high), at - base if base else at


def check_pairs(left: str, lefts: Sequence[Tensor], right: str, rights: Sequence[Tensor]) -> None:
    """Raises unless the right pieces are fp32 and both lists have the same sizes and device."""
    if rights:
        check_pieces(right, rights, lefts[0].device if lefts else rights[0].device, [torch.float32])
    left_sizes, right_sizes = [x.numel() for x in lefts], [x.numel() for x in rights]
    if left_sizes != right_sizes:
        raise ValueError(f"{left} and {right} must have the same sizes, got {left_sizes[:8]} and {right_sizes[:8]}")


def check_selection(name: str, pieces: Sequence[Tensor], threshold: Tensor, capacity: int, start: int) -> None:
    """Raises unless pieces, threshold, capacity and start are what a select op expects."""
    check_pieces(name, pieces, threshold.device, list(KINDS))
    if threshold.dtype != torch.float32 or threshold.dim() != 0:
        raise TypeError(f"threshold must be a 0-d float32 tensor, got {threshold.dtype} {tuple(threshold.shape)}")
    if capacity < 0:
        raise ValueError(f"capacity must be at least 0, got {capacity}")
    numel = sum(piece.numel() for piece in pieces)
    if not 0 <= start < max(numel, 1):
        raise ValueError(f"start must be in [0, {max(numel, 1)}), got {start}")


def index_dtype(numel: int) -> torch.dtype:
    """The dtype of indices into a vector of `numel` entries."""
    return torch.int32 if numel < 2**31 else torch.int64


def bounds_of(pieces: Sequence[Tensor]) -> list[int]:
    """Where each piece begins in the vector, and at the end where the last one ends: [pieces + 1]."""
    return [0, *accumulate(piece.numel() for piece in pieces)]


def is_aligned(pieces: Sequence[Tensor]) -> bool:
    """True if every piece begins at a multiple of 16 bytes, so that kernels may load 16 bytes at once."""
    return all(piece.data_ptr() % 16 == 0 for piece in pieces)


def device_table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """`rows` as an int64 tensor on `device`; rows seen lately are not copied again, and no copy waits."""
    return _device_table(tuple(tuple(row) for row in rows), device, _stream(device))


def block_table(bounds: Sequence[int], block: int, device: torch.device) -> tuple[list[int], Tensor]:
    """The first block of each piece, [pieces + 1], and the piece of each block, [blocks] int32 on `device`.

    A block is `block` entries of one piece, its last block perhaps fewer.
    """
    sizes = tuple(end - begin for begin, end in pairwise(bounds))
    return _block_table(sizes, block, device, _stream(device))


def piece_tables(x: Sequence[Tensor], y: Sequence[Tensor], block: int) -> tuple[list[int], tuple[Tensor, Tensor]]:
    """The first block of each piece, [pieces + 1], and the two tables that `addresses.locate` reads; numel > 0.

    They hold the addresses of the pieces of x, of any kind, and of y, which are fp32 where a kernel reads them.
    """
    device, bounds = x[0].device, bounds_of(x)
    first_block, piece_of_block = block_table(bounds, block, device)
    rows = [
        (bounds[i], bounds[i + 1], first_block[i], x[i].data_ptr(), KINDS[x[i].dtype], y[i].data_ptr())
        for i in range(len(x))
    ]
    return first_block, (device_table(rows, device), piece_of_block)


@lru_cache(maxsize=256)
def _device_table(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    return _to_device(torch.tensor(rows, dtype=torch.int64), device)


@lru_cache(maxsize=64)
def _block_table(sizes: tuple[int, ...], block: int, device: torch.device, stream: int) -> tuple[list[int], Tensor]:
    blocks = [-(-size // block) for size in sizes]
    pieces = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(blocks))
    return [0, *accumulate(blocks)], _to_device(pieces, device)


def _stream(device: torch.device) -> int:
    # A table belongs to the stream that filled it: another stream could read it too early.
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
