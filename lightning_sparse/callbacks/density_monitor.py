"""DensityMonitor: logs what was sent and kept back while training, and sums it up at the end of ``fit``."""

from __future__ import annotations

import warnings
from typing import Any

import rich
from rich.table import Table

from lightning_sparse.callbacks.record import Record
from lightning_sparse.strategy import SparseDDP


class Monitor:
    """Logs what the sparse exchange does, through ``LightningModule.log``, and prints one table when ``fit`` ends.

    It only reads: training with it is bit-equal to training without. The figures are those of the rank itself, never
    reduced over ranks, so loggers and the table show rank zero's. Keys:

    - ``sparse/density``: entries sent over elements, what is averaged densely included; ``sparse/density_asked``: the
      schedule's; with ``per_layer``, ``sparse/density/<parameter>``. Of the newest exchange that has ended.
    - ``sparse/bytes_per_step``: sent + received since the last look; ``sparse/bytes_over_dense``: over what a ring
      all-reduce of the same float32 gradients moves.
    - ``sparse/residual_over_gradient`` (``Gradients``): norm of what is kept back over the norm of this rank's own
      gradient; ``sparse/unshared_over_update`` (``Updates``): norm of weights - anchor over the norm of one update.
    - ``sparse/lr_scale`` (``Updates``): mean over parameters of the factor on their steps.
    - ``sparse/skipped``: steps of this rank so far whose gradients were not finite, if there are any.
    - ``sparse/share_select``, ``_encode``, ``_exchange``, ``_decode``: the stage's time since the last look over the
      time passed (validation not counted), on the host's clock. A stage that overlaps with the step counts whole.

    With one rank there is nothing to report; with another strategy it warns and does nothing.

    Args:
        every: optimizer steps between two looks; None takes the Trainer's ``log_every_n_steps``. Loggers write what
            they are given at multiples of ``log_every_n_steps`` only.
        per_layer: log the density of each parameter too. The table names the extremes in any case.

    Example:
        >>> from lightning_sparse import DensityMonitor
        >>> monitor = DensityMonitor(every=10)
    """

    def __init__(self, every: int | None = None, per_layer: bool = False) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"DensityMonitor: every must be an integer of at least 1 or None, got {every!r}")
        self.every = every
        self.per_layer = per_layer
        self._record: Record | None = None
        self._table: Table | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._record = self._table = None
        strategy = trainer.strategy
        if not isinstance(strategy, SparseDDP):
            if trainer.is_global_zero:
                warnings.warn(
                    f"DensityMonitor: expected strategy='sparse_ddp', got {type(strategy).__name__}: nothing to report",
                    stacklevel=2,
                )
        elif strategy.tap is not None:
            every = self.every if self.every is not None else trainer.log_every_n_steps
            # in phase with the Trainer's own logging, also after a resume
            ahead = trainer.global_step - strategy.tap.steps
            names = [name for name, _ in pl_module.named_parameters()]
            self._record = Record(strategy, names, 1 if trainer.fast_dev_run else every, ahead)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._record is not None and self._record.is_due():
            for key, value in self._record.look(self.per_layer).items():
                pl_module.log(f"sparse/{key}", value, on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._record is not None:
            self._record.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._record is not None:
            self._record.resume()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._record is not None and trainer.is_global_zero:
            self._table = self._record.table()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._table is not None:
            # the console that a running progress bar draws on
            rich.get_console().print(self._table)
        # neither outlives the run: both would be in the way of pickling for the next one
        self._record = self._table = None
