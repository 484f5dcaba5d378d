"""Trains the language model of train_lm.py on 2 ranks, then on 4, then on 3, from one checkpoint to the next.

python examples/elastic.py              # beside 2 ranks without a stop; some minutes on two cores
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from common import versions
from corpus import VALIDATION_SEED, Windows, read
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader
from train_lm import CONTEXT, GPT, VALIDATION_BATCH, VALIDATION_WINDOWS

import lightning_sparse as ls

BATCH = 24  # of all ranks together, so that a step is the same on any number of them
STAGES = (2, 4, 3)


class Text(pl.LightningDataModule):
    """Other windows in each epoch, the same for any number of ranks."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__()
        self.seed, self.steps = seed, steps
        self.texts = read()

    def train_dataloader(self) -> DataLoader:
        seed = 1000 * self.seed + self.trainer.current_epoch
        return DataLoader(Windows(self.texts[0], CONTEXT, seed, self.steps * BATCH), BATCH // self.trainer.world_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.texts[1], CONTEXT, VALIDATION_SEED, VALIDATION_WINDOWS), VALIDATION_BATCH)


class Quiet(Callback):
    """Says on rank 0 where training is, as progress bars of several trainings in a row do not."""

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["val_loss"])
            print(f"{trainer.world_size} ranks, step {trainer.global_step}: validation loss {loss:.4f}", flush=True)


def train(ranks: int, epochs: int, folder: Path, options: argparse.Namespace, path: Path | None) -> float:
    """The validation loss once so many epochs are over; the last one is saved in ``folder``."""
    pl.seed_everything(options.seed, verbose=False)
    model = GPT("small", options.lr, "cosine", options.steps * len(STAGES))
    trainer = pl.Trainer(
        strategy=ls.SparseDDPStrategy(
            start_method="spawn", residual_checkpoint=options.residual_checkpoint, guard=False
        ),
        accelerator="cpu",
        devices=ranks,
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), Quiet()],
        num_sanity_val_steps=0,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, Text(options.seed, options.steps), ckpt_path=path, weights_only=True)
    return float(trainer.callback_metrics["val_loss"])


def elastic(folder: Path, options: argparse.Namespace) -> float:
    """Every stage on another number of ranks."""
    path, loss = None, float("nan")
    for epoch, ranks in enumerate(STAGES):
        loss = train(ranks, epoch + 1, folder, options, path)
        path = folder / f"epoch={epoch}.ckpt"
    return loss


def main(options: argparse.Namespace) -> None:
    """Both runs, or what they gave before, as a table."""
    for tree in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(tree).setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as base:
        whole = train(2, len(STAGES), Path(base) / "whole", options, None)
        row = {
            "residual_checkpoint": options.residual_checkpoint,
            "steps": options.steps * len(STAGES),
            "lr": options.lr,
            "seed": options.seed,
            "whole": whole,
            "elastic": elastic(Path(base) / "parts", options),
            "versions": versions(),
        }
    print(table([row]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| seed | 2 ranks, without a stop | 2, then 4, then 3 ranks | difference |", "|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['seed']} | {row['whole']:.4f} | {row['elastic']:.4f} | {row['elastic'] / row['whole'] - 1:+.2%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of each stage")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--residual-checkpoint", choices=["exact", "mean", "none"], default="mean")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--print", type=Path, nargs="+", metavar="FILE", help="only a table of earlier results")
    options = parser.parse_args()
    if options.print:
        print(table([json.loads(path.read_text()) for path in options.print]))
    else:
        main(options)
