"""The strategy and the callbacks for ``pytorch_lightning.Trainer``."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.strategies import DDPStrategy

from lightning_sparse.callbacks.adascale_lr import AdaScaleRule
from lightning_sparse.callbacks.anchor_first import AnchorFirst
from lightning_sparse.callbacks.auto_warmup import AutoWarmupRule
from lightning_sparse.callbacks.density_monitor import Monitor
from lightning_sparse.callbacks.large_batch_lr import BatchLR
from lightning_sparse.callbacks.progress_bar import TrafficBar
from lightning_sparse.strategy import SparseDDP


class SparseDDPStrategy(SparseDDP, DDPStrategy):
    __doc__ = SparseDDP.__doc__
    _tree = "pytorch_lightning"

    def _first_callback(self) -> Callback:
        return _AnchorFirst()


class DensityMonitor(Monitor, Callback):
    __doc__ = Monitor.__doc__


class LargeBatchLR(BatchLR, Callback):
    __doc__ = BatchLR.__doc__


class SparseProgressBar(TrafficBar, RichProgressBar):
    __doc__ = TrafficBar.__doc__


class AdaScaleLR(AdaScaleRule, Callback):
    __doc__ = AdaScaleRule.__doc__


class AutoWarmup(AutoWarmupRule, Callback):
    __doc__ = AutoWarmupRule.__doc__


class _AnchorFirst(AnchorFirst, Callback):
    pass
