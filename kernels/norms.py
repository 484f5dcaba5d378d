"""The Euclidean norm of each piece of a vector, in one dense pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.addresses import load_block, locate
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import use_triton
from lightning_sparse.kernels.pieces import check_vectors, device_table, is_aligned, piece_tables

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096
CHUNK = 256
SLICE = 1 << 17
ROW = 512


@torch.no_grad()
def norms(vectors: Sequence[Tensor], fused: bool = True) -> Tensor:
    """Norms of pieces. Squares of one block are summed in fp32, blocks in fp64, in the same order each time.

    The norm of a piece does not depend on which other pieces there are. Entries above about 1e17 give infinity.

    Args:
        vectors: [numel of piece] fp32, bf16 or fp16 each; cast to fp32 before they are squared.
        fused: Take the kernel where there is one; False takes foreach operations on every device.

    Returns:
        [pieces] fp32 on the device of the pieces.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size or device does not fit.
    """
    device = check_vectors(vectors)
    if sum(x.numel() for x in vectors) == 0:
        return torch.zeros(len(vectors), device=device)
    if not (fused and use_triton(vectors[0])):
        return norms_torch(vectors)
    first_block, tables = piece_tables(vectors, vectors, BLOCK)
    blocks = first_block[-1]
    parts = torch.empty(1, blocks, dtype=torch.float32, device=device)  # [1, blocks]
    with torch.cuda.device_of(vectors[0]):
        _squares_kernel[(blocks,)](
            *tables, parts, ALIGNED=is_aligned(vectors), BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return join(parts, first_block)[0]


def norms_torch(vectors: Sequence[Tensor]) -> Tensor:
    """`norms` with foreach operations; on the CPU the rows of large pieces first, slice by slice."""
    return squares_torch(vectors).sqrt().float()


def squares_torch(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each piece: [pieces] fp64."""
    if vectors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(vectors), 2, torch.float32)).double().square()
    # a long sum in fp32 lanes drifts, so rows of it are taken apart and joined in fp64
    tails = [x[x.numel() // ROW * ROW :] for x in vectors]
    sums = torch.stack(torch._foreach_norm(tails, 2, torch.float32)).double().square()
    for i, x in enumerate(vectors):
        for part in x[: x.numel() // ROW * ROW].split(SLICE) if x.numel() >= ROW else ():
            sums[i] += torch.linalg.vector_norm(part.float().view(-1, ROW), dim=1).double().square().sum()
    return sums


def join(parts: Tensor, first_block: Sequence[int]) -> Tensor:
    """Norms from sums of squares of blocks.

    Args:
        parts: [r, blocks] fp32, r rows of sums.
        first_block: of each piece, [pieces + 1].

    Returns:
        [r, pieces] fp32.
    """
    rows, pieces = parts.shape[0], len(first_block) - 1
    out = torch.empty(rows, pieces, dtype=torch.float32, device=parts.device)
    first = device_table([first_block], parts.device)
    with torch.cuda.device_of(parts):
        _join_kernel[(pieces, rows)](parts, first, out, parts.shape[1], pieces, CHUNK=CHUNK, num_warps=4)
    return out


@jit
def _squares_kernel(  # type: ignore[no-untyped-def]
    pieces_ptr, piece_of_block_ptr, parts_ptr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    piece, address, kind, _ = locate(pieces_ptr, piece_of_block_ptr, block, BLOCK)
    x = load_block(address, kind, piece, ALIGNED, BLOCK)
    tl.store(parts_ptr + block, tl.sum(x * x, 0))


@jit
def _join_kernel(parts_ptr, first_ptr, out_ptr, blocks, pieces, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    piece, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(first_ptr + piece), tl.load(first_ptr + piece + 1)
    total = tl.zeros([CHUNK], tl.float64)
    for start in range(begin, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += tl.load(parts_ptr + row * blocks + at, mask=at < end, other=0).to(tl.float64)
    tl.store(out_ptr + row * pieces + piece, tl.sqrt(tl.sum(total, 0)).to(tl.float32))
