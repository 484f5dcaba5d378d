"""No op reads a number off the device before it returns: its wrapper runs here with the reads refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.compressors.top_k import _largest_by_threshold
from lightning_sparse.kernels.accumulate_select import accumulate_select
from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_matmul import block_matmul
from lightning_sparse.kernels.block_outer import block_outer
from lightning_sparse.kernels.difference_select import difference_select
from lightning_sparse.kernels.kth_largest import kth_largest
from lightning_sparse.kernels.moments import moments
from lightning_sparse.kernels.momentum_select import momentum_select
from lightning_sparse.kernels.nm_prune import nm_prune
from lightning_sparse.kernels.path import interpret
from lightning_sparse.kernels.scatter_add import scatter_add_
from lightning_sparse.kernels.select import select

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
OPS = {
    "select": lambda: select(pieces(0), LIMIT, 100, 7),
    "accumulate_select": lambda: accumulate_select(pieces(0), pieces(1), LIMIT, 100, 7),
    "difference_select": lambda: difference_select(pieces(0), pieces(1), LIMIT, 100, 7),
    "momentum_select": lambda: momentum_select(pieces(0), pieces(1), pieces(2), 0.9, 0.5, LIMIT, 100, 7),
    "scatter_add_": lambda: scatter_add_(pieces(0), *FEW, 0.5),
    "kth_largest": lambda: kth_largest(pieces(0), 100),
    "moments": lambda: moments(pieces(0)).with_zeros(5077),
    "block_matmul": lambda: block_matmul(INPUT, BLOCKS, LAYOUT, OUTPUT[0]),
    "block_matmul_transposed": lambda: block_matmul(OUTPUT, BLOCKS, LAYOUT, transposed=True),
    "block_outer": lambda: block_outer(INPUT, OUTPUT, LAYOUT),
    "nm_prune": lambda: nm_prune(INPUT, 2, 4),
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
