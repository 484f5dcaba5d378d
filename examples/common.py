"""What the example scripts share: one training run with one strategy, and the comparison of two."""

import argparse
import logging
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from cli import SPARSE, make_strategy
from pytorch_lightning.callbacks import Callback, RichProgressBar
from report import announce, write
from torch import nn
from torch.utils.data import DataLoader

from lightning_sparse.checksum import ranks_equal
from lightning_sparse.communicators.volume import ring_bytes
from lightning_sparse.version import __version__

POINTS = 10  # validations in a run
WARMUP_STEPS = 5  # steps left out of the median

Row = dict[str, Any]
Loaders = Callable[[int], tuple[DataLoader, DataLoader]]


@dataclass(frozen=True)
class Run:
    """One finished training run: what it reports, and its validation losses as (step, loss)."""

    row: Row
    curve: list[tuple[int, float]]


class Recorder(Callback):
    """Keeps the time of each training step, without validation, and the validation losses."""

    def __init__(self) -> None:
        self.curve: list[tuple[int, float]] = []
        self._intervals: list[tuple[Any, Any]] = []
        self._open: Any = None

    def seconds(self) -> list[float]:
        """Seconds of each step, from the start of its batch to the start of the next one (or of validation)."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [b - a if isinstance(a, float) else a.elapsed_time(b) / 1000 for a, b in self._intervals]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._close(trainer)
        self._open = _now(trainer)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._close(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._close(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.curve.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def _close(self, trainer: pl.Trainer) -> None:
        if self._open is not None:
            self._intervals.append((self._open, _now(trainer)))
            self._open = None


def train(
    name: str,
    options: argparse.Namespace,
    make_model: Callable[[], pl.LightningModule],
    make_loaders: Loaders,
    gradient_clip_val: float | None = None,
) -> Run:
    """Trains a new model with one strategy; every rank must call it.

    Args:
        make_loaders: from the world size to the training and validation loaders.
    """
    pl.seed_everything(options.seed, verbose=False)
    model = make_model()
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=make_strategy(name, options),
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.max_steps,
        val_check_interval=validation_interval(options.max_steps),
        check_val_every_n_epoch=None,
        gradient_clip_val=gradient_clip_val,
        callbacks=[recorder] if options.quiet else [recorder, *reports(name)],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=not options.quiet,
    )
    trainer.fit(model, *make_loaders(trainer.world_size))
    # Lightning leaves the model on the CPU; a check that uses the process group wants it on its device
    equal = ranks_equal(model.to(trainer.strategy.root_device))
    seconds = recorder.seconds()
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
    row = {
        "strategy": name,
        **exchanged(name, trainer, model),
        **metrics,
        "steps": trainer.global_step,
        "seconds_per_step": statistics.median(seconds[WARMUP_STEPS:] or seconds),
        "train_seconds": sum(seconds),
        "parameters": numel(model),
        "ranks_equal": equal,
        "world_size": trainer.world_size,
        "seed": options.seed,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "versions": versions(),
    }
    return Run(row, recorder.curve)


def exchanged(name: str, trainer: pl.Trainer, model: nn.Module) -> Row:
    """What was sent; bytes are sent + received per step and rank, for dense DDP those of a ring all-reduce in fp32."""
    if not name.startswith(SPARSE):
        dense = ring_bytes(4 * numel(model), trainer.world_size)
        return {"exchange": "all_reduce", "density": 1.0, "bytes_per_step": dense, "dense_bytes_per_step": dense}
    summary = trainer.strategy.summary()
    return {key: summary[key] for key in ("exchange", "density", "bytes_per_step", "dense_bytes_per_step")}


def reports(name: str) -> list[Callback]:
    """What shows progress while training."""
    if not name.startswith(SPARSE):
        return [RichProgressBar()]
    from lightning_sparse import DensityMonitor, SparseProgressBar

    return [SparseProgressBar(), DensityMonitor()]


def numel(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def validation_interval(max_steps: int) -> int:
    """Smallest divisor of `max_steps` that gives at most `POINTS` validations, so that the last step is validated."""
    return next(n for n in range(math.ceil(max_steps / POINTS), max_steps + 1) if max_steps % n == 0)


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pytorch_lightning": pl.__version__,
        "lightning_sparse": __version__,
    }


def main(
    options: argparse.Namespace,
    make_model: Callable[[], pl.LightningModule],
    make_loaders: Loaders,
    extend: Callable[[Row], Row] = lambda row: {},
    gradient_clip_val: float | None = None,
) -> None:
    """Trains with one strategy, or with two for a comparison, and reports on rank zero.

    Args:
        extend: from a row to the keys that only this script reports.
    """
    if options.threads is not None:
        # Lightning sets cores / ranks unless this variable is there; child processes inherit it
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
    for tree in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(tree).setLevel(logging.WARNING)
    if not options.quiet:
        logging.getLogger("lightning_sparse").setLevel(logging.INFO)
        logging.getLogger("lightning_sparse").addHandler(logging.StreamHandler())
    names = [options.strategy] + ([options.compare] if options.compare else [])
    runs = []
    for name in names:
        if not options.quiet:
            announce(f"{name}, {options.max_steps} steps on {options.devices} {options.accelerator} ranks")
        run = train(name, options, make_model, make_loaders, gradient_clip_val)
        runs.append(Run(run.row | extend(run.row), run.curve))
    write([run.row for run in runs], [run.curve for run in runs], options.json, options.plot)


def _now(trainer: pl.Trainer) -> Any:
    if trainer.strategy.root_device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
