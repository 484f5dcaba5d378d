"""Products of dense matrices at the places of a block-sparse one only: the gradient of its stored blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.block_checks import check_operand
from lightning_sparse.kernels.block_gather import ROWS, block_columns, row_slices, stacked
from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_tiles import is_whole, outer_tiles, precision, row_major, takes_kernel
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import interpreting

if TYPE_CHECKING:
    import triton.language as tl


@torch.no_grad()
def block_outer(x: Tensor, y: Tensor, layout: BlockLayout) -> Tensor:
    """Computes the blocks of x.T @ y that `layout` names, and none of the others.

    With x the input of a layer and y the gradient of its output, these are the gradients of the layer's blocks, also of
    blocks that are not stored, if a layout names them. Sums run over the rows in order, in float32 (float64 for
    float64), without atomics: the same bits in every call. On the CPU half types round every 256 rows.

    Args:
        x: [m, in_features] float32, bfloat16, float16 or float64.
        y: [m, out_features] of the same dtype, with any strides.

    Returns:
        [n, block, block] of the same dtype, zero beyond the matrix.

    Raises:
        TypeError: dtypes or devices differ.
        ValueError: a size does not fit.

    Source: the idea of Gray et al., "GPU Kernels for Block-Sparse Weights", 2017; layout and kernels are ours.
    """
    check_operand("x", x, layout.in_features, x)
    check_operand("y", y, layout.out_features, x)
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"x and y must have one number of rows, got {x.shape[0]} and {y.shape[0]}")
    if not takes_kernel(x):
        return block_outer_torch(x, y, layout)

    x, y = row_major(x), row_major(y)
    out = x.new_empty(layout.count, layout.block, layout.block)
    if layout.count == 0:
        return out
    whole = is_whole(layout, x, y)
    size = outer_tiles(layout.block, x.dtype, whole)
    rows, cols = layout.places(x.device)
    with torch.cuda.device_of(x):
        _block_outer_kernel[(layout.count,)](
            x, y, out, rows, cols, x.shape[0], x.shape[1], y.shape[1], x.stride(0), y.stride(0),
            WHOLE=whole, PRECISION=precision(x.dtype), WIDEN=interpreting(), BLOCK=layout.block, BLOCK_M=size.slice,
            num_warps=size.warps, num_stages=size.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def block_outer_torch(x: Tensor, y: Tensor, layout: BlockLayout) -> Tensor:
    """`block_outer` by one GEMM for each block row, of gathered inputs."""
    wide = x.dtype if x.shape[0] <= ROWS or x.dtype == torch.float64 else torch.float32
    out = torch.zeros(layout.count, layout.block, layout.block, dtype=wide, device=x.device)
    for part, above in zip(x.split(ROWS), y.split(ROWS), strict=True):
        columns = block_columns(part, layout)  # [block columns, block, m]
        for row, begin, end, cols in layout.row_pieces:
            outputs, width = row_slices(layout, row)
            inputs = stacked(columns, cols)  # [k * block, m]
            slab = out[begin:end].view(-1, layout.block)[:, :width]  # [k * block, width]
            if wide == x.dtype:
                slab.addmm_(inputs, above[:, outputs])
            else:
                slab += torch.mm(inputs, above[:, outputs])
    out = out.to(x.dtype)
    if layout.order is None:
        return out
    return torch.empty_like(out).index_copy_(0, layout.order.to(out.device), out)


@jit
def _block_outer_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, out_ptr, rows_ptr, cols_ptr, rows, inner, outer, x_stride, y_stride,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)  # [BLOCK]
    m = tl.arange(0, BLOCK_M).to(tl.int64)  # [BLOCK_M]
    if WHOLE:
        # what the compiler knows to be a multiple of 16 it loads 16 bytes at a time
        x_stride, y_stride = x_stride // 16 * 16, y_stride // 16 * 16
    at_x = tl.load(cols_ptr + slot).to(tl.int64) * BLOCK + n  # [BLOCK]
    at_y = tl.load(rows_ptr + slot).to(tl.int64) * BLOCK + n  # [BLOCK]
    x_tile = x_ptr + at_x[:, None] + m[None, :] * x_stride  # [BLOCK, BLOCK_M]
    y_tile = y_ptr + at_y[None, :] + m[:, None] * y_stride  # [BLOCK_M, BLOCK]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, rows, BLOCK_M):
        x_mask = m[None, :] < rows - start
        y_mask = m[:, None] < rows - start
        if not WHOLE:
            x_mask &= at_x[:, None] < inner
            y_mask &= at_y[None, :] < outer
        x = tl.load(x_tile, mask=x_mask, other=0)
        y = tl.load(y_tile, mask=y_mask, other=0)
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        x_tile += BLOCK_M * x_stride.to(tl.int64)
        y_tile += BLOCK_M * y_stride.to(tl.int64)
    place = slot * (BLOCK * BLOCK) + n[:, None] * BLOCK + n[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty))
