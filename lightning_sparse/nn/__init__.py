"""Layers whose backward is sparse. One layer a file."""

from lightning_sparse.nn.block_sparse_linear import BlockSparseLinear
from lightning_sparse.nn.convert import Change, Report, UnsuitableError, convert
from lightning_sparse.nn.lsh_linear import LSHLinear
from lightning_sparse.nn.nm import NM
from lightning_sparse.nn.skip_conv2d import SkipConv2d
from lightning_sparse.nn.skip_linear import SkipLinear
from lightning_sparse.nn.sparse_lstm import SparseLSTM

__all__ = [
    "NM",
    "BlockSparseLinear",
    "Change",
    "LSHLinear",
    "Report",
    "SkipConv2d",
    "SkipLinear",
    "SparseLSTM",
    "UnsuitableError",
    "convert",
]
