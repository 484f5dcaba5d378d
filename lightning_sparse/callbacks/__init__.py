"""Thin Lightning callbacks that drive the parts and report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sparse.pytorch_lightning import (
        AdaScaleLR,
        AutoWarmup,
        DensityMonitor,
        LargeBatchLR,
        SparseProgressBar,
    )

__all__ = [
    "AdaScaleLR",
    "AutoWarmup",
    "DensityMonitor",
    "LargeBatchLR",
    "SparseProgressBar",
]


def __getattr__(name: str) -> Any:
    # lazily, because each Lightning tree imports this package for its own classes
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_sparse import pytorch_lightning

    return getattr(pytorch_lightning, name)
