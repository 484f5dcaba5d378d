"""Optimizers and wrappers for large batches."""

from lightning_sparse.optim.adascale import AdaScale

__all__ = [
    "AdaScale",
]
