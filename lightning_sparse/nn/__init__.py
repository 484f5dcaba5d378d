"""Layers whose backward is sparse. One layer a file."""

from lightning_sparse.nn.lsh_linear import LSHLinear
from lightning_sparse.nn.sparse_lstm import SparseLSTM
from lightning_sparse.nn.work import Work

__all__ = [
    "LSHLinear",
    "SparseLSTM",
    "Work",
]
