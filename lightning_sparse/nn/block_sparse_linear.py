"""BlockSparseLinear: a linear layer that stores, multiplies and trains live blocks of its weight only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.kernels.block_checks import check_block
from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.nn.block_masks import block_norms, check_mask, largest_mask, random_mask
from lightning_sparse.nn.block_product import BlockProduct, block_crossover, blocks_of_matrix, matrix_of_blocks
from lightning_sparse.nn.convert import UnsuitableError
from lightning_sparse.nn.crossover import Crossover, rounded_up
from lightning_sparse.nn.eager import eager
from lightning_sparse.nn.precision import as_rows
from lightning_sparse.nn.topology import move_parameter_, plan_moves
from lightning_sparse.nn.work import Work

# beyond so many rows time grows with them on both paths
_MEASURED_ROWS = 2048


class BlockSparseLinear(nn.Module):
    """`nn.Linear` whose weight is zero outside of live blocks; forward and both gradients touch live blocks only.

    Weights begin as those of `nn.Linear` at the same places: at density 1, from the same random state, the layers are
    equal. Which blocks are live may change at any step, see `set_block_mask_`. Where the dense product is faster at
    this shape and density, measured once, it runs in place of the blocks'.

    Args:
        in_features: width of the input, no multiple of the block need be.
        out_features: width of the output.
        bias: as of `nn.Linear`.
        block: edge of a block: 16, 32, 64 or 128.
        density: share of blocks that are live, in (0, 1]; chosen at random from `seed`, the same on every rank.
        mask: [block rows, block columns] bool, in place of the density: live blocks, of outputs x inputs.
        seed: of the choice.
        crossover: density up to which blocks are multiplied one by one; None measures it.

    Attributes:
        weight: [n, block, block]: stored block s maps the inputs of its block column to the outputs of its block row.
        work: multiply-adds done and skipped, see `Work`.
        records_dead_gradient: True makes backward sum the gradient of dead blocks into `dead_gradient`.
        dead_gradient: [dead, block, block] float32, in row-major order of the mask's dead blocks; None until recorded.
            This rank's own, and scaled where a loss scaler is: average it over ranks as you do with gradients.

    Raises:
        ValueError: a size, density or mask that does not fit.

    Source: Gray et al., "GPU Kernels for Block-Sparse Weights", 2017; layout and topology interface are ours.

    Example:
        >>> layer = BlockSparseLinear(100, 40, block=16, density=0.25)
        >>> layer(torch.ones(3, 100)).shape, layer.block_mask.shape, int(layer.block_mask.sum())
        (torch.Size([3, 40]), torch.Size([3, 7]), 5)
    """

    bias: nn.Parameter | None
    block_rows: Tensor
    block_cols: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block: int = 64,
        density: float = 1.0,
        mask: Tensor | None = None,
        seed: int = 0,
        crossover: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_block("BlockSparseLinear", block)
        if in_features < 1 or out_features < 1:
            raise ValueError(f"BlockSparseLinear: features must be at least 1, got {in_features} and {out_features}")
        if crossover is not None and not 0 <= crossover <= 1:
            raise ValueError(f"BlockSparseLinear: crossover must be in [0, 1], got {crossover}")
        self.in_features, self.out_features, self.block = in_features, out_features, block
        self.crossover = crossover
        grid = -(-out_features // block), -(-in_features // block)
        mask = random_mask(grid, density, seed) if mask is None else check_mask(mask, grid)
        self._own = BlockLayout.of(mask, out_features, in_features, block)
        linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight = nn.Parameter(blocks_of_matrix(linear.weight.detach().t(), self._own))
        self.register_parameter("bias", linear.bias)
        self._register_places(linear.weight.device)
        self.work = Work()
        self.records_dead_gradient = False
        self.dead_gradient: Tensor | None = None
        self._dead: BlockLayout | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        block: int = 64,
        density: float = 1.0,
        mask: Tensor | None = None,
        crossover: float | None = None,
        rows: int | None = None,
    ) -> BlockSparseLinear:
        """The layer with the weights of a dense one: blocks of largest norm stay live, or those of `mask`.

        Raises:
            UnsuitableError: for a batch of so many `rows`, if they are given, `nn.Linear` was measured to be faster.
        """
        out_features, in_features = linear.weight.shape
        check_block("BlockSparseLinear", block)
        if mask is None:
            everything = torch.ones(-(-out_features // block), -(-in_features // block), dtype=torch.bool)
            every = BlockLayout.of(everything, out_features, in_features, block)
            mask = largest_mask(block_norms(blocks_of_matrix(linear.weight.detach().t(), every), every, 2.0), density)
        layer = cls(in_features, out_features, False, block=block, mask=mask, crossover=crossover, device="meta")
        layer.weight = nn.Parameter(
            blocks_of_matrix(linear.weight.detach().t(), layer._layout), requires_grad=linear.weight.requires_grad
        )
        layer.bias = linear.bias
        layer._register_places(linear.weight.device)
        if rows is not None:
            found = block_crossover(linear.weight.detach(), rows, layer._layout, packed=False)
            if layer.density > found.density:
                limit = f"above density {found.density:.2g}, got {layer.density:.2g}"
                raise UnsuitableError(f"with {rows} rows it is faster than blocks {limit}")
        return layer.train(linear.training)

    @property
    def block_mask(self) -> Tensor:
        """[block rows, block columns] bool on the CPU: a copy of the mask of live blocks."""
        return self._layout.mask.clone()

    @property
    def density(self) -> float:
        """Live blocks over all blocks."""
        return self._layout.count / self._layout.mask.numel()

    def forward(self, x: Tensor) -> Tensor:
        """[*, in_features] to [*, out_features]."""
        rows, weight, bias = as_rows("BlockSparseLinear", x, self.in_features, self.weight, self.bias)
        return self._product(rows, weight, bias).view(*x.shape[:-1], self.out_features)

    @eager
    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        watch = (self._dead_layout(), self._record) if self.records_dead_gradient else None
        sparse = self.density <= self._crossover(x).density
        return BlockProduct.apply(x, weight, bias, self._layout, lambda: self._layout, sparse, self.work, watch)

    @torch.no_grad()
    def set_block_mask_(self, mask: Tensor, optimizers: Optimizer | Iterable[Optimizer] = ()) -> tuple[int, int]:
        """Makes other blocks live; new ones begin at zero, with zero optimizer state. Returns (grown, dropped).

        Blocks that stay keep weight, gradient, optimizer state and, unless there are fewer blocks than before, their
        place in storage; steps that an optimizer has counted stay as well. What was recorded of dead blocks is
        forgotten. With another number of blocks `weight` changes its shape: under DDP, and under strategies that keep
        state by position, keep their number. Under ``sparse_ddp`` what ranks share or keep back of a dropped block has
        still to leave: validation may show a part of it in the new block for some exchanges.

        Args:
            mask: [block rows, block columns] bool, the same on every rank.
            optimizers: whose state of the weight moves with it.
        """
        before = self._layout
        moves = plan_moves(before, check_mask(mask, before.grid))
        move_parameter_(self.weight, moves, [optimizers] if isinstance(optimizers, Optimizer) else optimizers)
        self._set_layout(moves.layout)
        grown = moves.fresh.numel()
        return grown, before.count + grown - moves.layout.count

    def dense_weight(self) -> Tensor:
        """[out_features, in_features]: the weight as `nn.Linear` has it, differentiable."""
        return matrix_of_blocks(self.weight, self._layout).t()

    @torch.no_grad()
    def weight_scores(self, order: float = 2.0) -> Tensor:
        """[block rows, block columns] float32: the norm of each block, 0 for dead ones."""
        return block_norms(self.weight, self._layout, order)

    @torch.no_grad()
    def gradient_scores(self, order: float = 2.0) -> Tensor:
        """[block rows, block columns] float32: the norm of each block's gradient; dead blocks have 0 unless recorded.

        Raises:
            RuntimeError: no backward has run.
        """
        if self.weight.grad is None:
            raise RuntimeError("BlockSparseLinear: expected a gradient of the weight, got none: call backward first")
        scores = block_norms(self.weight.grad, self._layout, order)
        if self.dead_gradient is not None:
            scores += block_norms(self.dead_gradient, self._dead_layout(), order)
        return scores

    def forget_dead_gradient(self) -> None:
        """Drops what was recorded of dead blocks: backward sums into what is there."""
        self.dead_gradient = None

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, block={self.block}, density={self.density:.4g}"

    def _crossover(self, x: Tensor) -> Crossover:
        if self.crossover is not None:
            return Crossover(self.crossover)
        return block_crossover(x, min(rounded_up(x.shape[0]), _MEASURED_ROWS), self._layout, packed=True)

    def _record(self, gradient: Tensor) -> None:
        gradient = gradient.float()
        self.dead_gradient = gradient if self.dead_gradient is None else self.dead_gradient.add_(gradient)

    def _dead_layout(self) -> BlockLayout:
        if self._dead is None:
            self._dead = BlockLayout.of(~self._layout.mask, self.out_features, self.in_features, self.block)
        return self._dead

    def _set_layout(self, layout: BlockLayout) -> None:
        self._own, self._dead, self.dead_gradient = layout, None, None
        self._register_places(self.weight.device)

    def _register_places(self, device: torch.device) -> None:
        self.register_buffer("block_rows", self._own.rows.to(device, torch.int32))
        self.register_buffer("block_cols", self._own.cols.to(device, torch.int32))
        self._read = self._written()

    @property
    def _layout(self) -> BlockLayout:
        """Of the buffers: DDP writes rank 0's to them, with rank 0's weight, where ranks began with other places."""
        if self._written() != self._read:
            self._read = self._written()
            rows, cols = self.block_rows.cpu().long(), self.block_cols.cpu().long()
            if not (torch.equal(rows, self._own.rows) and torch.equal(cols, self._own.cols)):
                self._own = BlockLayout(rows, cols, self.out_features, self.in_features, self.block)
                self._dead = self.dead_gradient = None
        return self._own

    def _written(self) -> int:
        return sum(0 if x.is_inference() else x._version for x in (self.block_rows, self.block_cols))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight, rows, cols = (state_dict.get(prefix + name) for name in ("weight", "block_rows", "block_cols"))
        if rows is not None and cols is not None:
            if wrong := self._take_layout(weight, rows, cols):
                args[-1].append(f"{prefix}weight: {wrong}")
                return
        elif weight is not None and weight.shape == (self.out_features, self.in_features):
            # of `nn.Linear`: what lies in live blocks is taken
            state_dict[prefix + "weight"] = blocks_of_matrix(weight.t(), self._layout)
            state_dict[prefix + "block_rows"], state_dict[prefix + "block_cols"] = self.block_rows, self.block_cols
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _take_layout(self, weight: Tensor | None, rows: Tensor, cols: Tensor) -> str:
        """Makes room for blocks of a `state_dict`; where they do not fit, changes nothing and says why."""
        if rows.shape != cols.shape or rows.dim() != 1:
            return f"expected a row and a column of each block, got {list(rows.shape)} and {list(cols.shape)}"
        sizes = self.out_features, self.in_features, self.block
        layout = BlockLayout(rows.cpu().long(), cols.cpu().long(), *sizes)
        if not layout.fits:
            return f"expected blocks within {list(layout.grid)}, got others: another layer's"
        moved, shape = not layout.same_as(self._layout), (layout.count, self.block, self.block)
        if weight is None:
            return "expected the blocks whose places are given, got none" if moved else ""
        if weight.shape != shape:
            return f"expected {list(shape)}, got {list(weight.shape)}: another layer's"
        if layout.count != self._layout.count:
            self.weight.grad = None
            self.weight.data = self.weight.new_zeros(shape)
        if moved:
            self._set_layout(layout)
        return ""
