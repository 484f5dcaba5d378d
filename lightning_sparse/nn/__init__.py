"""Layers whose backward is sparse. One layer a file."""

from lightning_sparse.nn.block_sparse_linear import BlockSparseLinear

__all__ = [
    "BlockSparseLinear",
]
