"""The product of a batch with a block-sparse weight, differentiable, by blocks or by the dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_matmul import block_matmul
from lightning_sparse.kernels.block_outer import block_outer
from lightning_sparse.nn.crossover import Case, Crossover, Run, crossover
from lightning_sparse.nn.first_order import first_order
from lightning_sparse.nn.work import Work

Watch = Callable[[Tensor], None]
Now = Callable[[], BlockLayout]


class BlockProduct(torch.autograd.Function):
    """x @ W.T + bias with W in blocks; all gradients are taken at stored blocks only.

    With `watch` the gradient of all other blocks is computed as well and handed to it, [dead, block, block] in
    row-major order. `now` gives the layout that gradients are added up in: backward refuses another than `layout`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layout: BlockLayout,
        now: Now,
        sparse: bool,
        work: Work,
        watch: tuple[BlockLayout, Watch] | None,
    ) -> Tensor:
        ctx.layout, ctx.now, ctx.sparse, ctx.work, ctx.watch = layout, now, sparse, work, watch
        ctx.weights = layout.weights if sparse else layout.out_features * layout.in_features
        work.forward.add(x.shape[0], ctx.weights, layout.out_features * layout.in_features)
        if sparse:
            ctx.save_for_backward(x, weight)
            return block_matmul(x, weight, layout, bias)
        matrix = matrix_of_blocks(weight, layout)
        ctx.save_for_backward(x, matrix)
        return F.linear(x, matrix.t(), bias)

    @staticmethod
    @first_order("BlockSparseLinear", "nn.Linear")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout: BlockLayout = ctx.layout
        if not layout.same_as(ctx.now()):
            raise RuntimeError(
                "BlockSparseLinear: expected in backward the blocks of its forward pass, got others: change them after"
                " backward, or run forward again"
            )
        x, weight = ctx.saved_tensors
        dense_weights = layout.out_features * layout.in_features
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        if needs_x:
            ctx.work.input_gradient.add(x.shape[0], ctx.weights, dense_weights)
            grad_x = block_matmul(grad, weight, layout, transposed=True) if ctx.sparse else grad @ weight.t()
        if needs_weight:
            done = dense_weights if ctx.watch else ctx.weights
            ctx.work.weight_gradient.add(x.shape[0], done, dense_weights)
            if ctx.sparse:
                grad_weight = block_outer(x, grad, layout)
                if ctx.watch:
                    ctx.watch[1](block_outer(x, grad, ctx.watch[0]))
            else:
                matrix = x.t() @ grad
                grad_weight = blocks_of_matrix(matrix, layout)
                if ctx.watch:
                    ctx.watch[1](blocks_of_matrix(matrix, ctx.watch[0]))
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def matrix_of_blocks(blocks: Tensor, layout: BlockLayout) -> Tensor:
    """[in_features, out_features] with zeros where no block is stored: the weight of `nn.Linear`, transposed."""
    height, width = layout.grid
    b = layout.block
    places = (layout.rows * width + layout.cols).to(blocks.device)
    grid = blocks.new_zeros(height * width, b, b).index_copy(0, places, blocks)
    matrix = grid.view(height, width, b, b).permute(1, 2, 0, 3).reshape(width * b, height * b)
    return matrix[: layout.in_features, : layout.out_features]


def blocks_of_matrix(matrix: Tensor, layout: BlockLayout) -> Tensor:
    """[n, block, block]: the stored blocks of an [in_features, out_features] matrix, zero beyond it."""
    height, width = layout.grid
    b = layout.block
    if not layout.even:
        matrix = F.pad(matrix, (0, height * b - layout.out_features, 0, width * b - layout.in_features))
    grid = matrix.reshape(width, b, height, b).permute(2, 0, 1, 3).reshape(height * width, b, b)
    return grid.index_select(0, (layout.rows * width + layout.cols).to(matrix.device))


def evenly_spread(density: float, out_features: int, in_features: int, block: int) -> BlockLayout:
    """A layout for measuring: so many blocks at places of no pattern, the same in every call."""
    height, width = -(-out_features // block), -(-in_features // block)
    mask = torch.zeros(height * width, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    mask[torch.randperm(height * width, generator=generator)[: max(1, round(density * height * width))]] = True
    return BlockLayout.of(mask.view(height, width), out_features, in_features, block)


def block_crossover(like: Tensor, rows: int, layout: BlockLayout, packed: bool) -> Crossover:
    """Up to which density the blocks' products are faster than the dense ones, forward and backward together.

    Args:
        like: gives dtype and device.
        rows: of a batch.
        layout: gives the sizes.
        packed: True if the dense path has to make the dense weight from blocks, and blocks from its gradient, half of
            them live; False compares with `nn.Linear`.
    """
    sizes = layout.out_features, layout.in_features, layout.block
    case = Case.of(f"BlockSparseLinear{'' if packed else ' for nn.Linear'}", like, rows, *sizes)

    def operands() -> tuple[Tensor, Tensor]:
        return like.new_ones(rows, layout.in_features).requires_grad_(), like.new_ones(rows, layout.out_features)

    def blocks_run(density: float, sparse: bool) -> Run:
        (x, grad), spread = operands(), evenly_spread(density, *sizes)
        blocks = like.new_ones(spread.count, spread.block, spread.block).requires_grad_()

        def run() -> None:
            y = BlockProduct.apply(x, blocks, None, spread, lambda: spread, sparse, Work(), None)
            torch.autograd.grad(y, (x, blocks), grad)

        return run

    def linear_run() -> Run:
        (x, grad), weight = operands(), like.new_ones(sizes[:2]).requires_grad_()
        return lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

    def dense() -> Run:
        return blocks_run(0.5, sparse=False) if packed else linear_run()

    return crossover(case, dense, lambda density: blocks_run(density, sparse=True))
