"""Trains at batch x1, x4 and x16 for equal epochs with each rule for the learning rate, and compares the losses.

python examples/train_large_batch.py                                  # language model and digits, 3 seeds
python examples/train_large_batch.py --examples digits --seeds 0      # some of it
python examples/train_large_batch.py --json FILE --plot FILE          # finished runs in FILE are not run again
python examples/train_large_batch.py --ranks 2                        # over sparse_ddp at density 1 %

A batch x16 is 16 base batches whose gradients are accumulated by one rank, or 8 on each of two. "adascale-whole" alone
goes on for as many epochs as its scale-invariant steps take.
"""

import argparse
import json
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import train_digits
from common import versions
from corpus import VALIDATION_SEED, Windows, read
from large_batch_report import Row, markdown, plot, table
from pytorch_lightning.callbacks import Callback
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import DataLoader
from train_lm import CONTEXT, GPT, VALIDATION_BATCH, VALIDATION_WINDOWS

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import AdaScaleLR, AutoWarmup, LargeBatchLR

FACTORS = [1, 4, 16]


@dataclass(frozen=True)
class Setting:
    """What a rule may look at: examples of the base batch, how many such batches make a step, and a run's length."""

    base_batch: int
    factor: int
    epochs: int
    base_steps: int  # of the base batch in all epochs together

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return math.ceil(self.base_steps / self.epochs / self.factor) * self.epochs


@dataclass(frozen=True)
class Rule:
    """The callbacks of a run. Schedules count its steps, or those of the base batch if scale-invariant steps do."""

    callbacks: Callable[[Setting], list[Callback]]
    is_scale_invariant: bool = False
    is_schedule: bool = False  # takes the place of the model's own
    is_whole: bool = False  # goes on beyond the epochs, until the scale-invariant steps are made


def large_batch(rule: str) -> Rule:
    """`LargeBatchLR`, with a tenth of the run to warm up."""
    return Rule(lambda s: [LargeBatchLR(s.base_batch, rule, warmup_steps=s.steps // 10)])


RULES: dict[str, Rule] = {
    "none": Rule(lambda setting: []),
    "linear": large_batch("linear"),
    "sqrt": large_batch("sqrt"),
    "adascale": Rule(lambda setting: [AdaScaleLR()], is_scale_invariant=True),
    "adascale-whole": Rule(lambda s: [AdaScaleLR(steps=s.base_steps)], is_scale_invariant=True, is_whole=True),
    "autowu": Rule(lambda setting: [AutoWarmup(lr_max=10.0)], is_schedule=True),
}


class LanguageModel(GPT):
    """The model of `train_lm.py`, small, with SGD, warm-up and cosine over a run of any number of steps."""

    is_scheduled = True

    def __init__(self, lr: float, max_steps: int) -> None:
        super().__init__("tiny", lr, "cosine", max_steps)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}] if self.is_scheduled else []

    def _lr_factor(self, step: int) -> float:
        done = min(1.0, step / self.max_steps)
        return min(1.0, 20 * (done + 1 / self.max_steps)) * 0.5 * (1 + math.cos(math.pi * done))


class Digits(train_digits.ConvNet):
    """The network of `train_digits.py` with a cosine schedule."""

    is_scheduled = True

    def __init__(self, lr: float, max_steps: int) -> None:
        super().__init__(lr, momentum=0.9)
        self.max_steps = max_steps

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.max_steps)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}] if self.is_scheduled else []


@dataclass(frozen=True)
class Example:
    """One problem: what is trained at which rate, on how many examples in how many epochs."""

    base_batch: int
    epochs: int
    model: Callable[[int], pl.LightningModule]
    loaders: Callable[[int, int], tuple[DataLoader, DataLoader]]
    clip: float | None = None


def text(windows: int, batch: int, seed: int) -> tuple[DataLoader, DataLoader]:
    """So many training windows, drawn once, and the fixed validation windows."""
    train_text, val_text = read()
    train = Windows(train_text, CONTEXT, seed, windows)
    return DataLoader(train, batch), DataLoader(
        Windows(val_text, CONTEXT, VALIDATION_SEED, VALIDATION_WINDOWS), VALIDATION_BATCH
    )


EXAMPLES: dict[str, Example] = {
    "lm": Example(
        1, 1, lambda steps: LanguageModel(0.02, steps), lambda batch, seed: text(6400, batch, seed), clip=1.0
    ),
    "digits": Example(
        2, 20, lambda steps: Digits(0.0025, steps), lambda batch, seed: train_digits.make_loaders(batch, 1)
    ),
}


class Count(Callback):
    """Steps as a metric, which comes back from ranks that are processes of their own."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.log("steps", float(trainer.global_step), sync_dist=True)


def train(name: str, rule: str, factor: int, seed: int, ranks: int) -> Row:
    """One run; at the base batch there is nothing to share between ranks."""
    example = EXAMPLES[name]
    pl.seed_everything(seed, verbose=False)
    loaders = example.loaders(example.base_batch, seed)
    base_steps = len(loaders[0]) * example.epochs
    setting = Setting(example.base_batch, factor, example.epochs, base_steps)
    module = example.model(base_steps if RULES[rule].is_scale_invariant else setting.steps)
    module.is_scheduled = not RULES[rule].is_schedule
    is_whole = RULES[rule].is_whole
    shared = min(ranks, factor)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=shared,
        strategy=SparseDDPStrategy(density=0.01, start_method="spawn") if shared > 1 else "auto",
        max_epochs=-1 if is_whole else example.epochs,
        accumulate_grad_batches=factor // shared,
        check_val_every_n_epoch=1 if is_whole else example.epochs,
        gradient_clip_val=example.clip,
        callbacks=[Count(), *RULES[rule].callbacks(setting)],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, *loaders)
    return {
        "example": name,
        "rule": rule,
        "factor": factor,
        "batch": factor * example.base_batch,
        "lr": module.lr,
        "seed": seed,
        "ranks": ranks,
        "steps": (steps := int(trainer.callback_metrics["steps"])),
        "epochs": math.ceil(steps * factor / len(loaders[0])) if is_whole else example.epochs,
        **{key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")},
        "versions": versions(),
    }


Run = tuple[str, str, int, int, int]
"""Example, rule, factor, seed and ranks."""


def runs(options: argparse.Namespace) -> list[Run]:
    """What is to be trained: at the base batch all rules are the same."""
    return [
        (name, rule, factor, seed, options.ranks)
        for seed in options.seeds
        for name in options.examples
        for factor in options.factors
        for rule in (options.rules if factor > 1 else ["none"])
    ]


def run_of(row: Row) -> Run:
    """What a row was trained with."""
    return row["example"], row["rule"], row["factor"], row["seed"], row["ranks"]


def main(options: argparse.Namespace) -> None:
    """Trains what is missing, keeps each finished run, and reports."""
    for tree in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(tree).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    rows: list[Row] = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    wanted = runs(options)
    done = {run_of(row) for row in rows}
    with Progress(disable=options.quiet) as progress:
        task = progress.add_task("training", total=len(wanted))
        for run in wanted:
            progress.update(task, description="{}, {}, x{}, seed {}, {} ranks".format(*run))
            if run not in done:
                rows.append(train(*run))
                if options.json:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
            progress.advance(task)
    shown = [row for row in rows if run_of(row) in set(wanted)]
    Console().print(table(shown))
    if options.plot:
        plot(shown, options.plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", nargs="+", choices=list(EXAMPLES), default=["lm", "digits"])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--factors", nargs="+", type=int, default=FACTORS, help="batches over the base batch; with 1")
    parser.add_argument("--ranks", type=int, default=1, help="more than 1: sparse_ddp at density 1 %%, where x1 is not")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep each finished run there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss over batch there (PNG)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--print", type=Path, metavar="FILE", help="only a table of earlier results, as markdown")
    arguments = parser.parse_args()
    if arguments.print:
        print(markdown(json.loads(arguments.print.read_text())))
    elif 1 not in arguments.factors:
        parser.error(f"--factors: expected 1 among them, which the others are compared with, got {arguments.factors}")
    elif bad := [x for x in arguments.factors if x > 1 and (x < arguments.ranks or x % arguments.ranks)]:
        parser.error(f"--ranks: expected {arguments.ranks} to divide every factor above 1, got {bad}")
    else:
        main(arguments)
