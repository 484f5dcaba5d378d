"""Layers without second derivatives say so, where a gradient penalty would lose a part of the gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.nn import NM, BlockSparseLinear, LSHLinear, SkipConv2d, SkipLinear, SparseLSTM
from lightning_sparse.nn.crossover import pinned

Run = Callable[[Tensor], Tensor]


def of_image(layer: nn.Module) -> Run:
    return lambda x: layer(x.view(4, 1, 4, 4))


def of_series(layer: nn.Module) -> Run:
    return lambda x: layer(x.view(2, 2, 16))[0]


def of_classes(layer: LSHLinear) -> Run:
    return lambda x: layer.loss(x, torch.arange(4))


LAYERS: dict[str, Callable[[], Run]] = {
    "BlockSparseLinear": lambda: BlockSparseLinear(16, 16, block=16),
    "NM": lambda: NM(16, 16),
    "SkipLinear": lambda: SkipLinear(16, 16),
    "SkipConv2d": lambda: of_image(SkipConv2d(1, 2, 3)),
    "SparseLSTM": lambda: of_series(SparseLSTM(16, 8)),
    "LSHLinear": lambda: of_classes(LSHLinear(16, 50)),
}


CASES = [(name, path) for name in LAYERS for path in (0, 1) if (name, path) != ("SparseLSTM", 0)]  # that is nn.LSTM


@pytest.mark.parametrize(("name", "crossover"), CASES)
def test_a_gradient_penalty_is_refused(name: str, crossover: int) -> None:
    run, x = LAYERS[name](), torch.ones(4, 16, requires_grad=True)
    with pinned(crossover):
        out = run(x).square().sum()
        with pytest.raises(RuntimeError, match=rf"^[\w ]*{name}.*create_graph=True"):
            torch.autograd.grad(out, x, create_graph=True)
        torch.autograd.grad(run(x).sum(), x)
