"""No op reads a number off the device before it returns: its wrapper runs here with the reads refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.compressors.top_k import _largest_by_threshold
from lightning_sparse.kernels.accumulate_select import accumulate_select
from lightning_sparse.kernels.adam import Adam
from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_matmul import block_matmul
from lightning_sparse.kernels.block_outer import block_outer
from lightning_sparse.kernels.difference_select import difference_select
from lightning_sparse.kernels.kth_largest import kth_largest
from lightning_sparse.kernels.lamb_norms import lamb_norms
from lightning_sparse.kernels.lamb_step import lamb_step_
from lightning_sparse.kernels.lars_step import lars_step_
from lightning_sparse.kernels.moments import moments
from lightning_sparse.kernels.momentum_select import momentum_select
from lightning_sparse.kernels.nm_prune import nm_prune
from lightning_sparse.kernels.norms import norms
from lightning_sparse.kernels.path import interpret
from lightning_sparse.kernels.scatter_add import scatter_add_
from lightning_sparse.kernels.select import select
from lightning_sparse.kernels.take import take
from lightning_sparse.memory import MomentumResidual
from lightning_sparse.optim import LAMB, LARS
from lightning_sparse.vector import SparseVector

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique", "aten::equal"}

INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}


class NoWait(TorchDispatchMode):
    """Raises where the host would wait for a GPU."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().partition(".")[0]
        # indexing by a mask calls nonzero inside
        masked = name in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masked or name in WAITING:
            raise RuntimeError(f"{op} waits for the device")
        return op(*args, **(kwargs or {}))


def pieces(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (5000, 0, 77)]


LAYOUT = BlockLayout.of(torch.ones(2, 3, dtype=torch.bool), 32, 48, 16)
BLOCKS, INPUT, OUTPUT = torch.ones(6, 16, 16), torch.ones(4, 48), torch.ones(4, 32)
LIMIT, FEW = torch.tensor(1.5), (torch.ones(2), torch.tensor([3, 5003]))
ROWS, ADAM = (pieces(0), pieces(1), pieces(2), [x.square() for x in pieces(3)]), Adam(0.9, 0.99, 1.0, 1.0, 1e-6, 0.1)


def step(optimizer: Any) -> None:
    """One step of matrices and vectors in two groups, as on a GPU: with kernels."""
    weights = [torch.nn.Parameter(x.view(1, -1) if x.numel() > 100 else x) for x in pieces(0)]
    for weight, gradient in zip(weights, pieces(1), strict=True):
        weight.grad = gradient.view_as(weight)
    optimizer([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.1, weight_decay=0.1).step()


def discard() -> None:
    """What was sent leaves residual and momentum."""
    memory, names = MomentumResidual(0.9), ["a", "b", "c"]
    memory.begin(pieces(0), 1.0)
    memory.accumulate(names, pieces(0)).select(LIMIT, 100, 0)
    memory.discard(names, SparseVector(*FEW, 5077))


OPS = {
    "select": lambda: select(pieces(0), LIMIT, 100, 7),
    "accumulate_select": lambda: accumulate_select(pieces(0), pieces(1), LIMIT, 100, 7),
    "difference_select": lambda: difference_select(pieces(0), pieces(1), LIMIT, 100, 7),
    "momentum_select": lambda: momentum_select(pieces(0), pieces(1), pieces(2), 0.9, 0.5, LIMIT, 100, 7),
    "scatter_add_": lambda: scatter_add_(pieces(0), *FEW, 0.5),
    "take": lambda: take(pieces(0), *FEW),
    "discard": discard,
    "kth_largest": lambda: kth_largest(pieces(0), 100),
    "moments": lambda: moments(pieces(0)).with_zeros(5077),
    "block_matmul": lambda: block_matmul(INPUT, BLOCKS, LAYOUT, OUTPUT[0]),
    "block_matmul_transposed": lambda: block_matmul(OUTPUT, BLOCKS, LAYOUT, transposed=True),
    "block_outer": lambda: block_outer(INPUT, OUTPUT, LAYOUT),
    "nm_prune": lambda: nm_prune(INPUT, 2, 4),
    "norms": lambda: norms(pieces(0)),
    "lars_step_": lambda: lars_step_(pieces(0), pieces(1), pieces(2), torch.ones(3), 0.1, 0.1, 0.9, True),
    "lamb_norms": lambda: lamb_norms(*ROWS, ADAM),
    "lamb_step_": lambda: lamb_step_(*ROWS, torch.ones(3), ADAM),
    "lars": lambda: step(LARS),
    "lamb": lambda: step(LAMB),
    "top_k": lambda: _largest_by_threshold(pieces(0), 5077, 100),
}


@pytest.mark.parametrize("op", OPS)
def test_op_does_not_wait(op):
    with interpret(), NoWait():
        OPS[op]()


@pytest.mark.parametrize("wait", [float, bool, Tensor.nonzero, lambda x: x[x > 0]], ids=["float", "bool", "at", "mask"])
def test_waiting_is_noticed(wait):
    with pytest.raises(RuntimeError, match="waits for the device"), NoWait():
        wait(torch.ones(1))
