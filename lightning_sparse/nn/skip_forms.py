"""The three products of a layer in each form: densely, compacted to live rows and columns ("lines"), by live tiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparse.nn.crossover import Run, rounded_up
from lightning_sparse.nn.live import Live, find_live, put, take
from lightning_sparse.nn.products import Products
from lightning_sparse.nn.tile_matmul import tile_matmul


def output(products: Products, form: str, x: Tensor, weight: Tensor, bias: Tensor | None, live: Live) -> Tensor:
    """[m, o, ...] of x [m, i, ...], of which ``live`` says what is not zero, and weight [o, i, ...]."""
    if form == "dense":
        return products.output(x, weight, bias)
    size = products.out_size(x, weight)
    if form == "tiles" and live.tiles is not None:
        out = tile_matmul(x, live.tiles, weight.t())
    else:
        operands = take(x, live.rows, live.columns), take(weight, None, live.columns)
        out = _compact(products.output, operands, live.rows, None, (len(x), weight.shape[0], *size))
    return out if bias is None else out.add_(bias.view(-1, *(1,) * len(size)))


def grad_input(
    products: Products,
    form: str,
    grad: Tensor,
    weight: Tensor,
    x: Tensor,
    live: Live,
    rows: Tensor | None,
    columns: Tensor | None,
) -> Tensor:
    """[m, i, ...] of grad [m, o, ...], of which ``live`` says what is not zero; made in ``rows`` and ``columns``."""
    if form == "dense":
        return products.grad_input(grad, weight, x)
    if form == "tiles" and live.tiles is not None:
        return tile_matmul(grad, live.tiles, weight)
    operands = take(grad, rows, live.columns), take(weight, live.columns, columns)
    return _compact(lambda a, b: products.grad_input(a, b, x), operands, rows, columns, x.shape)


def grad_weight(
    products: Products,
    form: str,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    live: Live,
    live_x: Live,
    rows: Tensor | None,
) -> Tensor:
    """[o, i, ...] of grad [m, o, ...] and x [m, i, ...], which are both live in ``rows`` only."""
    if form == "dense":
        return products.grad_weight(grad, x, weight)
    if form == "tiles":
        # by the sparser of both
        if live_x.tiles is not None and live_x.tile_density <= live.tile_density:
            return tile_matmul(x, live_x.tiles, grad, transposed=True).t()
        if live.tiles is not None:
            return tile_matmul(grad, live.tiles, x, transposed=True)
    operands = take(grad, rows, live.columns), take(x, rows, live_x.columns)
    return _compact(
        lambda a, b: products.grad_weight(a, b, weight), operands, live.columns, live_x.columns, weight.shape
    )


def timed_run(
    products: Products, tile: int | None, when: str, form: str, density: float, x: Tensor, weight: Tensor
) -> Run:
    """A pass in one form, and the look at its operand, at a density of that operand: what crossovers are made of.

    Args:
        when: "forward", "input gradient" or "weight gradient".
        x, weight: give sizes, rows rounded up, device and dtype.
    """
    rows = rounded_up(len(x))
    weights, inputs = torch.ones_like(weight), x.new_ones(rows, *x.shape[1:])
    grads = x.new_ones(rows, weight.shape[0], *products.out_size(x, weight))
    checked = grads if when == "input gradient" else inputs
    _thin_out_(checked, density, tile if form == "tiles" else None)
    dense = Live(None, None, (1, 1))

    def run() -> None:
        live = dense if form == "dense" else find_live(checked, tile)
        if when == "forward":
            output(products, form, inputs, weights, None, live)
        elif when == "input gradient":
            grad_input(products, form, grads, weights, inputs, live, live.rows, None)
        else:
            grad_weight(products, form, grads, inputs, weights, dense, live, live.rows)

    return run


def _thin_out_(x: Tensor, density: float, tile: int | None) -> None:
    """Sets columns of x to zero, spread evenly; with ``tile``, tiles, at other places in each row of tiles."""
    step = tile or 1
    columns = -(-x.shape[1] // step)
    for row in range(0, len(x) if tile else 1, step):
        # places that are passed over in turn, as 7 has no factor in common with a power of two
        places = (torch.arange(columns, device=x.device) * 7 + row // step) % columns
        dead = (places >= math.ceil(density * columns)).repeat_interleave(step)[: x.shape[1]]
        (x[row : row + step] if tile else x)[:, dead] = 0


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
