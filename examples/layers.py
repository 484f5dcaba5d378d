"""Trains one model with one layer and another, on one device, and compares losses at equal steps and at equal time."""

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from common import numel, validation_interval, versions
from pytorch_lightning.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

Row = dict[str, Any]
Loaders = tuple[DataLoader, DataLoader]
WARMUP_STEPS = 5  # steps left out of the median


def make_parser(description: str, variants: list[str], max_steps: int, batch_size: int, lr: float) -> Any:
    """The command line of scripts that compare layers; the first variant is the dense one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants, help="layers to train with")
    parser.add_argument("--max-steps", type=int, default=max_steps, help="of the first; others go on for equal time")
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def compare(
    options: argparse.Namespace,
    make_model: Callable[[str], pl.LightningModule],
    make_loaders: Callable[[int], Loaders],
) -> None:
    """Trains every variant with the same seed and data, prints the table and writes the JSON file.

    The first runs `--max-steps` steps. The others run as many, and go on until they have taken as much time.

    Args:
        make_loaders: from the most steps that a run may take to its loaders.
    """
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
    for tree in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(tree).setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for variant in options.variants:
        seconds = rows[0]["seconds"] if rows else 0.0
        rows.append(_train(variant, options, make_model, make_loaders, seconds))
        print(f"{variant}: {rows[-1]['val_loss']:.4f} after {rows[-1]['seconds']:.1f} s", file=sys.stderr)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    Console().print(_table(rows))


class Clock(Callback):
    """Keeps the time of training steps, without validation, and ends training when steps and time are used up.

    Time is the process's CPU time on a CPU, which other processes of the machine do not change, and wall time else.
    """

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.least = steps, seconds
        self.laps: list[float] = []
        self.curve: list[tuple[int, float, float]] = []
        self._begin = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin = _now(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.laps.append(_now(trainer) - self._begin)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loss = float(trainer.callback_metrics["val_loss"])
        self.curve.append((len(self.laps), sum(self.laps), loss))
        trainer.should_stop = len(self.laps) >= self.steps and sum(self.laps) >= self.least


def _now(trainer: pl.Trainer) -> float:
    if trainer.strategy.root_device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _train(
    variant: str,
    options: argparse.Namespace,
    make_model: Callable[[str], pl.LightningModule],
    make_loaders: Callable[[int], Loaders],
    seconds: float,
) -> Row:
    pl.seed_everything(options.seed, verbose=False)
    model, clock = make_model(variant), Clock(options.max_steps, seconds)
    interval = validation_interval(options.max_steps)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=1,
        # until the clock says stop
        max_steps=-1,
        max_epochs=1,
        val_check_interval=interval,
        check_val_every_n_epoch=None,
        callbacks=[clock],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, *make_loaders(500 * options.max_steps))
    at_steps = next(point for point in clock.curve if point[0] >= options.max_steps)
    in_time = [point for point in clock.curve if not seconds or point[1] <= seconds] or clock.curve[:1]
    return {
        "command": f"python examples/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "variant": variant,
        "steps": options.max_steps,
        "val_loss": at_steps[2],
        "seconds": at_steps[1],
        "seconds_per_step": statistics.median(clock.laps[WARMUP_STEPS:] or clock.laps),
        "equal_time_steps": in_time[-1][0],
        "equal_time_val_loss": in_time[-1][2],
        "parameters": numel(model),
        "seed": options.seed,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "versions": versions(),
        "curve": clock.curve,
    }


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"{rows[0]['parameters']:,} parameters")
    for name in ("", "ms per step", "loss after equal steps", "loss after equal time", "steps in that time"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(
            row["variant"],
            f"{1000 * row['seconds_per_step']:.1f}",
            f"{row['val_loss']:.4f} ({row['steps']})",
            f"{row['equal_time_val_loss']:.4f}",
            str(row["equal_time_steps"]),
        )
    return table
