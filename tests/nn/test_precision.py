"""Layers compute in the dtype in which the layers that they replace do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.nn import NM, BlockSparseLinear, SkipConv2d, SkipLinear, SparseLSTM
from lightning_sparse.nn.crossover import pinned

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "BlockSparseLinear": (lambda: BlockSparseLinear(16, 16, block=16), lambda: nn.Linear(16, 16), (3, 16)),
    "NM": (lambda: NM(16, 16), lambda: nn.Linear(16, 16), (3, 16)),
    "SkipLinear": (lambda: SkipLinear(16, 16), lambda: nn.Linear(16, 16), (3, 16)),
    "SkipConv2d": (lambda: SkipConv2d(2, 2, 3), lambda: nn.Conv2d(2, 2, 3), (1, 2, 8, 8)),
    "SparseLSTM": (lambda: SparseLSTM(16, 8), lambda: nn.LSTM(16, 8), (2, 3, 16)),
}


def output(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_results_have_the_dtype_of_the_dense_layer(name: str, dtype: torch.dtype, autocast: bool) -> None:
    make, make_dense, shape = LAYERS[name]
    x = torch.randn(shape, dtype=dtype)
    with pinned(1), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, want = (output(kind().to(dtype), x) for kind in (make, make_dense))
    assert got.dtype == want.dtype == (torch.bfloat16 if autocast and dtype != torch.float64 else dtype)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_mixed_dtypes_are_refused(name: str, autocast: bool) -> None:
    make, _, shape = LAYERS[name]
    with pinned(1), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for dtype in (torch.float64, torch.int64):
            message = rf"^{name}: expected input and parameters of one dtype, got {dtype} and"
            with pytest.raises(TypeError, match=message):
                make()(torch.zeros(shape, dtype=dtype))
