"""Dense times block-sparse: each output block sums the products with the stored blocks of its row, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.block_checks import check_blocks, check_operand
from lightning_sparse.kernels.block_gather import ROWS, block_columns, row_slices, stacked
from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_tiles import is_whole, precision, row_major, takes_kernel, tiles
from lightning_sparse.kernels.jit import jit
from lightning_sparse.kernels.path import interpreting

if TYPE_CHECKING:
    import triton.language as tl


@torch.no_grad()
def block_matmul(
    x: Tensor, blocks: Tensor, layout: BlockLayout, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Computes x @ W.T + bias, or x @ W if `transposed`, with W the block-sparse matrix of `nn.Linear`'s form.

    Only stored blocks are read. Products are summed in float32 (float64 for float64) block by block, without atomics:
    the same bits in every call. On the CPU half types round each block row's share before it is summed.

    Args:
        x: [m, in_features], or [m, out_features] if `transposed`; float32, bfloat16, float16 or float64.
        blocks: [n, block, block] of the same dtype, as `layout` describes.
        bias: [out_features] of the same dtype; not with `transposed`.

    Returns:
        [m, out_features], or [m, in_features] if `transposed`.

    Raises:
        TypeError: dtypes or devices differ.
        ValueError: a size does not fit.

    Source: the idea of Gray et al., "GPU Kernels for Block-Sparse Weights", 2017; layout and kernels are ours.
    """
    check_blocks(blocks, layout)
    check_operand("x", x, layout.out_features if transposed else layout.in_features, blocks)
    if bias is not None:
        check_operand("bias", bias.unsqueeze(0), layout.out_features, blocks)
        if transposed:
            raise ValueError("bias must be None with transposed=True: it belongs to the outputs")
    if not takes_kernel(x):
        return block_matmul_torch(x, blocks, layout, bias, transposed)

    x, blocks = row_major(x), blocks.contiguous()
    y = x.new_empty(x.shape[0], layout.in_features if transposed else layout.out_features)
    if y.numel() == 0:
        return y
    visits = layout.visits(x.device, transposed)
    whole = is_whole(layout, x, blocks, y)
    size = tiles(layout.block, x.dtype, x.shape[0], whole)
    groups = layout.grid[transposed]
    with torch.cuda.device_of(x):
        _block_matmul_kernel[(-(-x.shape[0] // size.rows) * groups,)](
            x, blocks, y if bias is None else bias, y, visits.starts, visits.slots, visits.others,
            x.shape[0], x.shape[1], y.shape[1], x.stride(0),
            BIAS=bias is not None, TRANSPOSED=transposed, WHOLE=whole, PRECISION=precision(x.dtype),
            WIDEN=interpreting(), BLOCK=layout.block, BLOCK_M=size.rows, BLOCK_K=size.slice,
            num_warps=size.warps, num_stages=size.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def block_matmul_torch(
    x: Tensor, blocks: Tensor, layout: BlockLayout, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """`block_matmul` by one GEMM for each block row: of gathered inputs, or, `transposed`, into sums that scatter."""
    if layout.order is not None:
        blocks = blocks.index_select(0, layout.order.to(blocks.device))
    blocks = blocks.contiguous()
    y = x.new_zeros(x.shape[0], layout.in_features if transposed else layout.out_features)
    for part, out in zip(x.split(ROWS), y.split(ROWS), strict=True):
        if transposed:
            out.copy_(_scattered(part, blocks, layout)[: layout.in_features].t())
        else:
            _gathered(part, blocks, layout, out)
    return y if bias is None else y.add_(bias)


def _gathered(x: Tensor, blocks: Tensor, layout: BlockLayout, out: Tensor) -> None:
    columns = block_columns(x, layout)  # [block columns, block, m]
    for row, begin, end, cols in layout.row_pieces:
        outputs, width = row_slices(layout, row)
        inputs = stacked(columns, cols)  # [k * block, m]
        slab = blocks[begin:end].view(-1, layout.block)[:, :width]  # [k * block, width]
        torch.mm(inputs.t(), slab, out=out[:, outputs])


def _scattered(x: Tensor, blocks: Tensor, layout: BlockLayout) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = torch.zeros(layout.grid[1], layout.block, x.shape[0], dtype=wide, device=x.device)
    for row, begin, end, cols in layout.row_pieces:
        outputs, width = row_slices(layout, row)
        slab = blocks[begin:end].view(-1, layout.block)[:, :width]  # [k * block, width]
        if isinstance(cols, slice) and wide == x.dtype:
            sums[cols].flatten(0, 1).addmm_(slab, x[:, outputs].t())
            continue
        products = torch.mm(slab, x[:, outputs].t()).view(end - begin, layout.block, len(x)).to(wide)  # [k, block, m]
        if isinstance(cols, slice):
            sums[cols] += products
        else:
            sums.index_add_(0, cols.to(x.device), products)
    return sums.flatten(0, 1)


@jit
def _block_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, blocks_ptr, bias_ptr, y_ptr, starts_ptr, slots_ptr, others_ptr, rows, inner, outer, x_stride,
    BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, BLOCK_M)
    group = (tl.program_id(0) // row_tiles).to(tl.int64)
    m = (tl.program_id(0) % row_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = tl.arange(0, BLOCK)  # [BLOCK]
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    if WHOLE:
        # what the compiler knows to be a multiple of 16 it loads 16 bytes at a time
        x_stride, outer = x_stride // 16 * 16, outer // 16 * 16
    x_rows = x_ptr + m[:, None] * x_stride
    if TRANSPOSED:
        tile = n[None, :] * BLOCK + k[:, None]
    else:
        tile = k[:, None] * BLOCK + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    begin, end = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
    for step in range(begin * (BLOCK // BLOCK_K), end * (BLOCK // BLOCK_K)):
        visit = step // (BLOCK // BLOCK_K)
        shift = step % (BLOCK // BLOCK_K) * BLOCK_K
        slot = tl.load(slots_ptr + visit).to(tl.int64)
        place = tl.load(others_ptr + visit).to(tl.int64) * BLOCK + shift + k  # [BLOCK_K]
        mask = m[:, None] < rows
        if not WHOLE:
            mask &= place[None, :] < inner
        x = tl.load(x_rows + place[None, :], mask=mask, other=0)
        w = tl.load(blocks_ptr + slot * (BLOCK * BLOCK) + shift * (1 if TRANSPOSED else BLOCK) + tile)
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    at = group * BLOCK + n  # [BLOCK]
    if BIAS:
        total += tl.load(bias_ptr + at, mask=at < outer, other=0).to(tl.float32)[None, :]
    mask = m[:, None] < rows
    if not WHOLE:
        mask &= at[None, :] < outer
    tl.store(y_ptr + m[:, None] * outer + at[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)
