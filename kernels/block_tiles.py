"""What the block GEMM kernels share: tile sizes, and how exact products of float32 are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.kernels.block_layout import BlockLayout
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


def tiles(block: int, dtype: torch.dtype, rows: int, whole: bool) -> Tiles:
    """Sizes for blocks of `block`, with few rows where the operand has few.

    Where blocks are not `whole`, or not aligned, loads are narrow and pass through registers: a larger tile would spill
    them.
    """
    few = rows <= 16
    if dtype == torch.float32:
        # without tensor cores products are summed in registers too
        return Tiles(16 if few else 64, 16, 4 if block < 128 else 8, 3)
    if few or not whole:
        return Tiles(16 if few else 64, min(block, 64 if whole else 32), 4, 3)
    return Tiles(64 if rows <= 64 or block == 128 else 128, min(block, 64), 4, 3)


def outer_tiles(block: int, dtype: torch.dtype, whole: bool) -> Tiles:
    """Sizes where the rows are what is summed over: `slice` of them at a time, for a whole block."""
    return Tiles(block, 16 if dtype == torch.float32 else 64 if whole else 32, 4 if block < 128 else 8, 3)


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: as torch's own float32 products are, see `torch.set_float32_matmul_precision`.

    AMD's matrix cores multiply float32 itself, and not all of them have tf32.
    """
    lower = dtype == torch.float32 and torch.version.hip is None and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if lower else "ieee"


def row_major(x: Tensor) -> Tensor:
    """x itself if its rows lie in memory one by one, any distance apart, else a copy."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def is_whole(layout: BlockLayout, *operands: Tensor) -> bool:
    """True where no block reaches beyond the matrix and all of every operand can be read 16 bytes at a time."""
    return layout.even and all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 for x in operands)
