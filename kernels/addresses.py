"""What kernels do with the addresses in a table of pieces: load and store blocks, gather entries, find a piece.

bf16 is read and written as bits, so that the interpreter and a GPU agree on every one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_sparse.kernels.jit import jit

if TYPE_CHECKING:
    import triton.language as tl


@jit
def locate(pieces_ptr, piece_of_block_ptr, block, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """((begin and length of a block's piece, the block's shift in it), address and kind of x, address of y)."""
    row = pieces_ptr + 6 * tl.load(piece_of_block_ptr + block)
    begin = tl.load(row)
    piece = begin, tl.load(row + 1) - begin, (block - tl.load(row + 2)) * BLOCK
    return piece, tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)


@jit
def load_block(address, kind, piece, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of a piece as fp32 [BLOCK], zero beyond the piece's end."""
    if kind == 0:
        x = _load(_pointers(address, tl.float32, piece, ALIGNED, BLOCK), piece, BLOCK)
    elif kind == 1:
        x = from_bfloat16(_load(_pointers(address, tl.uint16, piece, ALIGNED, BLOCK), piece, BLOCK))
    else:
        x = _load(_pointers(address, tl.float16, piece, ALIGNED, BLOCK), piece, BLOCK).to(tl.float32)
    return x


@jit
def store_block(address, x, piece, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes fp32 x [BLOCK] to one block of an fp32 piece, up to the piece's end."""
    _store(_pointers(address, tl.float32, piece, ALIGNED, BLOCK), x, piece, BLOCK)


@jit
def store_rounded(address, kind, x, piece, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes fp32 x [BLOCK] to one block of a piece of any kind, rounded to nearest even."""
    if kind == 0:
        _store(_pointers(address, tl.float32, piece, ALIGNED, BLOCK), x, piece, BLOCK)
    elif kind == 1:
        _store(_pointers(address, tl.uint16, piece, ALIGNED, BLOCK), to_bfloat16(x), piece, BLOCK)
    else:
        _store(_pointers(address, tl.float16, piece, ALIGNED, BLOCK), x.to(tl.float16), piece, BLOCK)


@jit
def gather(address, kind, offset, mask):  # type: ignore[no-untyped-def]
    """Entries at `offset` of pieces at `address`, each of its own kind, as fp32; zero where masked."""
    x = tl.load(address.to(tl.pointer_type(tl.float32)) + offset, mask=mask & (kind == 0), other=0)
    half = address.to(tl.pointer_type(tl.float16)) + offset
    brain = address.to(tl.pointer_type(tl.uint16)) + offset
    x = tl.where(kind == 1, from_bfloat16(tl.load(brain, mask=mask & (kind == 1), other=0)), x)
    return tl.where(kind == 2, tl.load(half, mask=mask & (kind == 2), other=0).to(tl.float32), x)


@jit
def from_bfloat16(bits):  # type: ignore[no-untyped-def]
    """bf16 bits (uint16) as fp32: exact, where the interpreter's own cast loses denormals."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@jit
def to_bfloat16(x):  # type: ignore[no-untyped-def]
    """fp32 as bf16 bits (uint16), rounded to nearest even, where the interpreter's own cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16)


@jit
def upper_bound(sorted_ptr, length, x, mask, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many entries of a sorted int64 array are at most x, for each x; STEPS is `length.bit_length()`."""
    low = tl.zeros_like(x)
    high = low + length
    for _ in range(STEPS):
        middle = (low + high) // 2
        active = mask & (low < high)
        right = tl.load(sorted_ptr + middle, mask=active, other=0) <= x
        low = tl.where(active & right, middle + 1, low)
        high = tl.where(active & ~right, middle, high)
    return low


@jit
def _pointers(address, DTYPE: tl.constexpr, piece, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    _, _, shift = piece
    base = address.to(tl.pointer_type(DTYPE)) + shift
    if ALIGNED:
        # A block's size is a multiple of 16 bytes, so its shift keeps the alignment of its piece.
        base = tl.multiple_of(base, 16)
    return base + tl.arange(0, BLOCK)


@jit
def _load(pointers, piece, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    _, length, shift = piece
    # Whole blocks are loaded without a mask: a length known only to the device would make the loads scalar.
    if shift + BLOCK <= length:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=shift + tl.arange(0, BLOCK) < length, other=0)
    return x


@jit
def _store(pointers, x, piece, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    _, length, shift = piece
    if shift + BLOCK <= length:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=shift + tl.arange(0, BLOCK) < length)
