"""Skipping: the three products of a layer, without what zeros would add to them, where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sparse.nn import skip_forms
from lightning_sparse.nn.crossover import Case, Switch, crossover, rounded_up
from lightning_sparse.nn.eager import eager
from lightning_sparse.nn.first_order import first_order
from lightning_sparse.nn.live import Live, both, find_live
from lightning_sparse.nn.products import Products, macs
from lightning_sparse.nn.work import Pass, Work

_DENSITIES = (0.125, 0.5, 1.0)
# denser operands are not worth measuring a crossover for
_WORTHWHILE = 0.9
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Skipping:
    """How a layer multiplies: densely, compacted to live rows and columns, or by live tiles.

    Each pass chooses by what is live in its operands, against a crossover measured once for its shape, and changes its
    mind only when the density has left a band around the crossover.

    Args:
        name: of the layer, for crossovers.
        products: the dense ones.
        tile: side of tiles, or None for none.
        relu_input: gradients for inputs are made in the input's live rows and columns only.
        strict: passes run densely where what zeros are multiplied with is not finite, so that NaN comes of it.
    """

    def __init__(self, name: str, products: Products, tile: int | None, relu_input: bool, strict: bool) -> None:
        self.name, self.products, self.relu_input, self.strict = name, products, relu_input, strict
        self.tile = tile if products.tiled else None
        self.work = Work()
        self._switches: dict[str, Switch] = {}

    @eager
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[m, o, ...] of x [m, i, ...] and weight [o, i, ...]."""
        return _Skipping.apply(x, weight, bias, self)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, live: Live) -> Tensor:
        """The output; ``live`` is of x."""
        lines = live.row_count * live.column_count * weight.shape[0]
        form = self._form("forward", self.work.forward, lines, live.tile_density, (weight,), x, weight)
        return skip_forms.output(self.products, form, x, weight, bias, live)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, live_x: Live, needs: tuple[bool, ...]) -> _Gradients:
        """Gradients of x, weight and bias, those that are needed."""
        live = find_live(grad, self.tile)
        rows, columns = live.rows, None
        if self.relu_input:
            rows, columns = both(live.rows, live_x.rows, len(x)), live_x.columns
        shared = both(live.rows, live_x.rows, len(x))
        dx_form = dw_form = "dense"
        if needs[0]:
            inputs = x.shape[1] if columns is None else len(columns)
            lines = _count(rows, len(x)) * live.column_count * inputs
            count = self.work.input_gradient
            dx_form = self._form("input gradient", count, lines, live.tile_density, (weight,), x, weight)
        if needs[1]:
            lines = _count(shared, len(x)) * live.column_count * live_x.column_count
            tiles = min(live.tile_density, live_x.tile_density)
            dw_form = self._form("weight gradient", self.work.weight_gradient, lines, tiles, (grad, x), x, weight)
        if dx_form == dw_form == "dense":
            return self.products.gradients(grad, x, weight, needs)
        dx = dw = None
        if needs[0]:
            dx = skip_forms.grad_input(self.products, dx_form, grad, weight, x, live, rows, columns)
        if needs[1]:
            dw = skip_forms.grad_weight(self.products, dw_form, grad, x, weight, live, live_x, shared)
        return dx, dw, grad.sum([0, *range(2, grad.dim())]) if needs[2] else None

    def _form(
        self, when: str, count: Pass, lines: int, tiles: float, others: tuple[Tensor, ...], x: Tensor, weight: Tensor
    ) -> str:
        """The form of a pass, whose products are counted.

        Args:
            lines: products of one sample, input and output that compaction leaves.
            tiles: fraction of products that tiles leave.
        """
        every = len(x) * weight.shape[0] * weight.shape[1]
        fractions = {"lines": lines / max(1, every), "tiles": tiles}
        form = min(fractions, key=fractions.__getitem__)
        if not self._gains(when, form, fractions[form], others, x, weight):
            form = "dense"
        done = {"dense": every, "lines": lines, "tiles": round(tiles * every)}[form]
        count.add(macs(self.products, x, weight), done, every)
        return form

    def _gains(
        self, when: str, form: str, density: float, others: tuple[Tensor, ...], x: Tensor, weight: Tensor
    ) -> bool:
        if density > _WORTHWHILE or (self.strict and not all(bool(other.isfinite().all()) for other in others)):
            return False
        options = (self.tile or 0,) if form == "tiles" else self.products.options()
        case = Case.of(f"{self.name} {when}, {form}", x, rounded_up(len(x)), *x.shape[1:], *weight.shape, *options)
        found = crossover(
            case,
            lambda: skip_forms.timed_run(self.products, self.tile, when, "dense", 1.0, x, weight),
            lambda at: skip_forms.timed_run(self.products, self.tile, when, form, at, x, weight),
            _DENSITIES,
        )
        return self._switches.setdefault(f"{when} {form}", Switch()).takes_sparse(density, found)


class _Skipping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, skipping: Skipping) -> Tensor:
        live = find_live(x, skipping.tile)
        ctx.save_for_backward(x, weight)
        ctx.live, ctx.skipping = live, skipping
        return skipping.forward(x, weight, bias, live)

    @staticmethod
    @first_order("SkipLinear and SkipConv2d", "nn.Linear or nn.Conv2d")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *ctx.skipping.backward(grad, x, weight, ctx.live, ctx.needs_input_grad[:3]), None


def _count(selected: Tensor | None, size: int) -> int:
    return size if selected is None else len(selected)
