"""Skipping: the three products of a layer, without what zeros would add to them, where that is faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_matmul import block_matmul
from lightning_sparse.nn.crossover import Case, Run, Switch, crossover, rounded_up
from lightning_sparse.nn.live import Live, both, find_live, put, take
from lightning_sparse.nn.products import Products, macs
from lightning_sparse.nn.work import Pass, Work

_DENSITIES = (0.125, 0.5, 1.0)
# denser operands are not worth measuring a crossover for
_WORTHWHILE = 0.9


class Skipping:
    """How a layer multiplies: densely, compacted to live rows and columns ("lines"), or by live tiles.

    Each pass chooses by what is live in its operands, against a crossover measured once for its shape, and changes its
    mind only when the density has left a band around the crossover.

    Args:
        name: of the layer, for crossovers.
        products: the dense ones.
        tile: side of tiles, or None for none.
        relu_input: gradients for inputs are made in the input's live rows and columns only.
        strict: passes whose other operand is not finite run densely, so that 0 times infinity is NaN.
    """

    def __init__(self, name: str, products: Products, tile: int | None, relu_input: bool, strict: bool) -> None:
        self.name, self.products, self.relu_input, self.strict = name, products, relu_input, strict
        self.tile = tile if products.tiled else None
        self.work = Work()
        self._switches: dict[str, Switch] = {}

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[m, o, ...] of x [m, i, ...] and weight [o, i, ...]."""
        return _Skipping.apply(x, weight, bias, self)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, live: Live) -> Tensor:
        """The forward pass; ``live`` is of x."""
        every, out = self._size(x, weight)
        lines = live.row_count * live.column_count * weight.shape[0]
        form = self._form("forward", lines / every, live.tile_density, weight, x, weight)
        if form == "tiles":
            self._count(self.work.forward, _layout(live).weights * weight.shape[0], every, 1)
            product = block_matmul(weight, _blocks(x, live), _layout(live)).t()
            return product if bias is None else product.add_(bias)
        unit = macs(self.products, x, weight)
        if form == "dense":
            self._count(self.work.forward, every, every, unit)
            return self.products.output(x, weight, bias)
        self._count(self.work.forward, lines, every, unit)
        shape = (len(x), weight.shape[0], *out)
        operands = take(x, live.rows, live.columns), take(weight, None, live.columns)
        product = _compact(self.products.output, operands, live.rows, None, shape)
        return product if bias is None else product.add_(bias.view(-1, *(1,) * len(out)))

    def grad_input(self, grad: Tensor, weight: Tensor, x: Tensor, live: Live, live_x: Live) -> Tensor:
        """The gradient of x; ``live`` is of the gradient of the output."""
        every, _ = self._size(x, weight)
        rows, columns = live.rows, None
        if self.relu_input:
            rows, columns = both(live.rows, live_x.rows, len(x)), live_x.columns
        inputs = x.shape[1] if columns is None else len(columns)
        lines = _count_of(rows, len(x)) * live.column_count * inputs
        form = self._form("input gradient", lines / every, live.tile_density, weight, x, weight)
        if form == "tiles":
            self._count(self.work.input_gradient, _layout(live).weights * x.shape[1], every, 1)
            return block_matmul(weight.t(), _blocks(grad, live), _layout(live)).t()
        unit = macs(self.products, x, weight)
        if form == "dense":
            self._count(self.work.input_gradient, every, every, unit)
            return self.products.grad_input(grad, weight, x)
        self._count(self.work.input_gradient, lines, every, unit)
        operands = take(grad, rows, live.columns), take(weight, live.columns, columns)
        return _compact(lambda a, b: self.products.grad_input(a, b, x), operands, rows, columns, x.shape)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, live: Live, live_x: Live) -> Tensor:
        """The gradient of the weight, by the sparser of both operands where tiles are skipped."""
        every, _ = self._size(x, weight)
        rows = both(live.rows, live_x.rows, len(x))
        lines = _count_of(rows, len(x)) * live.column_count * live_x.column_count
        density = min(live.tile_density, live_x.tile_density)
        form = self._form("weight gradient", lines / every, density, grad, x, weight)
        if form == "tiles":
            self._count(self.work.weight_gradient, round(density * every), every, 1)
            if live_x.tile_density <= live.tile_density:
                return block_matmul(grad.t(), _blocks(x, live_x), _layout(live_x), transposed=True)
            return block_matmul(x.t(), _blocks(grad, live), _layout(live), transposed=True).t()
        unit = macs(self.products, x, weight)
        if form == "dense":
            self._count(self.work.weight_gradient, every, every, unit)
            return self.products.grad_weight(grad, x, weight)
        self._count(self.work.weight_gradient, lines, every, unit)
        operands = take(grad, rows, live.columns), take(x, rows, live_x.columns)
        return _compact(
            lambda a, b: self.products.grad_weight(a, b, weight), operands, live.columns, live_x.columns, weight.shape
        )

    def _size(self, x: Tensor, weight: Tensor) -> tuple[int, tuple[int, ...]]:
        """Samples times inputs times outputs, at least 1, and the output's other sizes."""
        return max(1, len(x) * weight.shape[0] * weight.shape[1]), self.products.out_size(x, weight)

    def _count(self, count: Pass, done: int, every: int, unit: int) -> None:
        count.add(unit, done, every)

    def _form(self, when: str, lines: float, tiles: float, other: Tensor, x: Tensor, weight: Tensor) -> str:
        best, density = min((("lines", lines), ("tiles", tiles)), key=lambda pair: pair[1])
        if density > _WORTHWHILE or (self.strict and not bool(other.isfinite().all())):
            return "dense"
        case = Case.of(
            f"{self.name} {when}, {best}", x, rounded_up(len(x)), *x.shape[1:], *weight.shape, *self._options(best)
        )
        found = crossover(
            case,
            lambda: _run(self, when, "dense", 1.0, x, weight),
            lambda at: _run(self, when, best, at, x, weight),
            _DENSITIES,
        )
        switch = self._switches.setdefault(f"{when} {best}", Switch())
        return best if switch.takes_sparse(density, found) else "dense"

    def _options(self, form: str) -> tuple[int, ...]:
        if form == "tiles":
            return (self.tile or 0,)
        options = (getattr(self.products, name, ()) for name in ("stride", "padding", "dilation"))
        return tuple(size for sizes in options for size in sizes)


class _Skipping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, skipping: Skipping) -> Tensor:
        live = find_live(x, skipping.tile)
        out = skipping.output(x, weight, bias, live)
        ctx.save_for_backward(x, weight)
        ctx.live, ctx.skipping = live, skipping
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        skipping, live = ctx.skipping, find_live(grad, ctx.skipping.tile)
        dx = skipping.grad_input(grad, weight, x, live, ctx.live) if ctx.needs_input_grad[0] else None
        dweight = skipping.grad_weight(grad, x, weight, live, ctx.live) if ctx.needs_input_grad[1] else None
        dbias = grad.transpose(0, 1).flatten(1).sum(1) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


def _compact(
    product: Callable[[Tensor, Tensor], Tensor],
    operands: tuple[Tensor, Tensor],
    rows: Tensor | None,
    columns: Tensor | None,
    shape: tuple[int, ...],
) -> Tensor:
    """The product of compacted operands, spread over the rows and columns of its full shape."""
    if any(operand.numel() == 0 for operand in operands):
        return operands[0].new_zeros(shape)
    return put(product(*operands), rows, columns, shape)


def _count_of(selected: Tensor | None, size: int) -> int:
    return size if selected is None else len(selected)


def _layout(live: Live) -> BlockLayout:
    assert live.tiles is not None
    return live.tiles


def _blocks(x: Tensor, live: Live) -> Tensor:
    """The live tiles of x, [n, tile, tile], each transposed, as block ops want them."""
    layout = _layout(live)
    tile, (rows, columns) = layout.block, layout.grid
    if not layout.even:
        x = F.pad(x, (0, columns * tile - x.shape[1], 0, rows * tile - x.shape[0]))
    tiles = x.reshape(rows, tile, columns, tile).permute(0, 2, 3, 1)
    return tiles[layout.rows.to(x.device), layout.cols.to(x.device)].contiguous()


class _Forced(Skipping):
    """Runs every pass in one form, to time it."""

    def __init__(self, like: Skipping, form: str) -> None:
        super().__init__(like.name, like.products, like.tile, relu_input=False, strict=False)
        self.form = form

    def _form(self, *_: Any) -> str:
        return self.form


def _run(like: Skipping, when: str, form: str, density: float, x: Tensor, weight: Tensor) -> Run:
    """A pass in one form, with the look at its operand, at a density of that operand."""
    forced, rows = _Forced(like, form), rounded_up(len(x))
    weights, inputs = torch.ones_like(weight), x.new_ones(rows, *x.shape[1:])
    grads = x.new_ones(rows, weight.shape[0], *like.products.out_size(x, weight))
    checked = grads if when == "input gradient" else inputs
    step = forced.tile if form == "tiles" and forced.tile else 1
    columns = -(-checked.shape[1] // step)
    for row in range(0, rows if form == "tiles" else step, step):
        # dead columns spread evenly; dead tiles at other places in each row of tiles
        places = (torch.arange(columns, device=x.device) * 7 + row // step) % columns
        dead = (places >= math.ceil(density * columns)).repeat_interleave(step)[: checked.shape[1]]
        (checked[row : row + step] if form == "tiles" else checked)[:, dead] = 0

    def run() -> None:
        live = Live(None, None, (1, 1)) if form == "dense" else find_live(checked, forced.tile)
        everything = Live(None, None, (rows, weight.shape[1]))
        if when == "forward":
            forced.output(inputs, weights, None, live)
        elif when == "input gradient":
            forced.grad_input(grads, weights, inputs, live, everything)
        else:
            forced.grad_weight(grads, inputs, weights, Live(None, None, (rows, weight.shape[0])), live)

    return run
