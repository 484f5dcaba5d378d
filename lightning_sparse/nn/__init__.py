"""Layers whose backward is sparse. One layer a file."""

from lightning_sparse.nn.block_sparse_linear import BlockSparseLinear
from lightning_sparse.nn.convert import Change, Report, UnsuitableError, convert
from lightning_sparse.nn.nm import NM

__all__ = [
    "NM",
    "BlockSparseLinear",
    "Change",
    "Report",
    "UnsuitableError",
    "convert",
]
