"""What the block GEMM kernels share: tile sizes, and how exact products of float32 are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.kernels.path import use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Tiles(NamedTuple):
    """Sizes of one program's work: rows of the operands, the slice of a block that it multiplies at a time, warps and
    stages of the pipeline."""

    rows: int
    slice: int
    warps: int
    stages: int


def takes_kernel(x: Tensor) -> bool:
    """True where the kernel runs: on a GPU (or interpreted), for every dtype but float64, which torch multiplies."""
    return use_triton(x) and x.dtype in DTYPES


def tiles(block: int, dtype: torch.dtype, rows: int) -> Tiles:
    """Sizes for blocks of `block`, with few rows where the operand has few."""
    if dtype == torch.float32:
        # without tensor cores products are summed in registers, which a larger tile would spill
        return Tiles(16 if rows <= 16 else 64, min(block, 32), 4 if block < 128 else 8, 2)
    if rows <= 16:
        return Tiles(16, min(block, 64), 4, 3)
    return Tiles(64 if rows <= 64 or block == 128 else 128, min(block, 64), 4, 3)


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: as torch's own float32 products are, see `torch.set_float32_matmul_precision`."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


def row_major(x: Tensor) -> Tensor:
    """x itself if its rows lie in memory one by one, any distance apart, else a copy."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def is_aligned(block: int, *operands: Tensor) -> bool:
    """True where every row of every operand, cut at any block, begins at a multiple of 16 bytes."""
    size = operands[0].element_size()
    return block * size % 16 == 0 and all(
        x.data_ptr() % 16 == 0 and x.stride(0) * size % 16 == 0 and x.stride(0) % 16 == 0 for x in operands
    )
