"""Up to which fraction of the classes the estimated softmax is faster than the whole one."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.nn.active_softmax import Active, active_cross_entropy
from lightning_sparse.nn.crossover import Case, Crossover, Run, crossover
from lightning_sparse.nn.lsh_tables import LSHTables
from lightning_sparse.nn.work import Work

_DENSITIES = (0.125, 0.5, 1.0)


def lsh_crossover(weight: Tensor, tables: LSHTables, batch: int, bucket: int, interval: int) -> Crossover:
    """The crossover of a loss with its backward pass, with a step's share of finding the rows; optimizers left out.

    Args:
        weight: [n, h].
        tables: built.
        interval: steps from one hashing to the next.
    """
    sizes = (batch, *weight.shape, tables.tables, tables.bits, bucket, interval)
    return crossover(
        Case.of("LSHLinear", weight, *sizes),
        lambda: _product(weight, batch, None),
        lambda density: _search_and_product(weight, tables, batch, bucket, interval, density),
        _DENSITIES,
    )


def _search_and_product(
    weight: Tensor, tables: LSHTables, batch: int, bucket: int, interval: int, density: float
) -> Run:
    product = _product(weight, batch, density)
    x = weight.new_ones(batch, weight.shape[1])
    shift = torch.zeros(tables.tables, dtype=torch.int64, device=x.device)
    share = weight[: -(-len(weight) // interval)]
    hashed = LSHTables(tables.features, tables.tables, tables.bits, tables.seed)

    def run() -> None:
        hashed.build(share, None)
        live = torch.zeros(len(weight) + 1, dtype=torch.bool, device=x.device)
        live[tables.query(x, bucket, shift).flatten()] = True
        live.nonzero()
        product()

    return run


def _product(weight: Tensor, batch: int, density: float | None) -> Run:
    """A loss and its backward pass over a fraction of the rows; over all of them, where they lie, without one."""
    rows = None
    if density is not None:
        count = max(1, int(density * len(weight)))
        rows = torch.linspace(0, len(weight) - 1, count, device=weight.device).long()
    leaf, x = weight.detach().requires_grad_(), weight.new_zeros(batch, weight.shape[1])
    inputs = x.clone().requires_grad_()
    active = Active(rows, torch.zeros(batch, dtype=torch.int64, device=weight.device), None)

    def run() -> None:
        with torch.enable_grad():
            loss = active_cross_entropy(inputs, x, leaf, None, active, None, Work(), True).sum()
            torch.autograd.grad(loss, [inputs, leaf])

    return run
