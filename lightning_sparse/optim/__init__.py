"""Optimizers and wrappers for large batches."""

from lightning_sparse.optim.adascale import AdaScale
from lightning_sparse.optim.lamb import LAMB
from lightning_sparse.optim.lars import LARS
from lightning_sparse.optim.operators import PTO, Serial

__all__ = [
    "LAMB",
    "LARS",
    "PTO",
    "AdaScale",
    "Serial",
]
