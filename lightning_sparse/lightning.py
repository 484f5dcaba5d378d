"""The strategy for ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_sparse.callbacks.anchor_first import AnchorFirst
from lightning_sparse.strategy import SparseDDP


class SparseDDPStrategy(SparseDDP, DDPStrategy):
    __doc__ = SparseDDP.__doc__
    _tree = "lightning.pytorch"

    def _first_callback(self) -> Callback:
        return _AnchorFirst()


class _AnchorFirst(AnchorFirst, Callback):
    pass
