"""Sparse gradient and update exchange for PyTorch Lightning.

>>> import lightning_sparse
>>> from pytorch_lightning import Trainer
>>> trainer = Trainer(strategy="sparse_ddp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)

Importing registers the strategies and does nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_sparse.trees import register_trees
from lightning_sparse.version import __version__

if TYPE_CHECKING:
    from lightning_sparse.codecs import Quantized, Raw
    from lightning_sparse.communicators import AllGather, CompressedAllReduce, VirtualRanks
    from lightning_sparse.compressors import SampledTopK, TopK, WeightBlocks
    from lightning_sparse.memory import MomentumResidual, NoMemory, Residual
    from lightning_sparse.pytorch_lightning import DensityMonitor, SparseDDPStrategy, SparseProgressBar
    from lightning_sparse.schedules import constant, exponential_warmup, piecewise
    from lightning_sparse.sync import Gradients, Updates

_EXPORTS = {
    "AllGather": "communicators",
    "CompressedAllReduce": "communicators",
    "DensityMonitor": "pytorch_lightning",
    "Gradients": "sync",
    "MomentumResidual": "memory",
    "NoMemory": "memory",
    "Quantized": "codecs",
    "Raw": "codecs",
    "Residual": "memory",
    "SampledTopK": "compressors",
    "SparseDDPStrategy": "pytorch_lightning",
    "SparseProgressBar": "pytorch_lightning",
    "TopK": "compressors",
    "Updates": "sync",
    "VirtualRanks": "communicators",
    "WeightBlocks": "compressors",
    "constant": "schedules",
    "exponential_warmup": "schedules",
    "piecewise": "schedules",
}

__all__ = [
    "AllGather",
    "CompressedAllReduce",
    "DensityMonitor",
    "Gradients",
    "MomentumResidual",
    "NoMemory",
    "Quantized",
    "Raw",
    "Residual",
    "SampledTopK",
    "SparseDDPStrategy",
    "SparseProgressBar",
    "TopK",
    "Updates",
    "VirtualRanks",
    "WeightBlocks",
    "__version__",
    "constant",
    "exponential_warmup",
    "piecewise",
]

register_trees()


def __getattr__(name: str) -> Any:
    # lazily, so that importing the package imports neither Lightning nor triton
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
