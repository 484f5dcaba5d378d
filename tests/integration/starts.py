"""Ways to start ranks, and numbers of them, with both taps against stock DDP; every rank writes a file.

python tests/integration/starts.py FOLDER START RANKS       # "popen", "spawn" or "fork": Lightning starts the others
torchrun --nproc-per-node=RANKS tests/integration/starts.py FOLDER torchrun RANKS
python tests/integration/starts.py FOLDER cli RANKS         # LightningCLI, the strategy given in YAML
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader

import lightning_sparse as ls
from lightning_sparse.checksum import ranks_equal
from tests.integration.modes import BATCH, ENOUGH, STEPS, TAPS, Net, loader


class Start(NamedTuple):
    """How ranks come about, and how many."""

    way: str
    ranks: int


STARTS: dict[str, Start] = {
    "`sparse_ddp`, 1 rank": Start("popen", 1),
    "`sparse_ddp`, 3 ranks": Start("popen", 3),
    "`sparse_ddp`, 4 ranks": Start("popen", 4),
    "`sparse_ddp_spawn`": Start("spawn", 2),
    "`sparse_ddp_fork`": Start("fork", 2),
    "`torchrun`": Start("torchrun", 2),
    "`LightningCLI`, parts by `class_path`": Start("cli", 2),
}

UPDATES = """
class_path: lightning_sparse.SparseDDPStrategy
init_args:
  density: 0.5
  exchange: {class_path: lightning_sparse.Updates, init_args: {every: 1}}
  compressor: {class_path: lightning_sparse.WeightBlocks}
  codec: {class_path: lightning_sparse.Quantized, init_args: {bits: 2}}
  communicator: {class_path: lightning_sparse.CompressedAllReduce}
"""
GRADIENTS = """
class_path: lightning_sparse.SparseDDPStrategy
init_args:
  density: 0.1
  exchange: {class_path: lightning_sparse.Gradients, init_args: {dense_below: 100}}
  compressor: {class_path: lightning_sparse.TopK, init_args: {scope: layer}}
  memory: {class_path: lightning_sparse.Residual}
  codec: {class_path: lightning_sparse.Raw, init_args: {values: bf16}}
  residual_checkpoint: exact
"""


class WithData(Net):
    """As `LightningCLI` wants it."""

    def train_dataloader(self) -> DataLoader:
        return loader(BATCH * self.trainer.world_size * STEPS)


class Report(pl.Callback):
    """What a rank has at the end of training, while the others are still there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.before = self._loss(module)

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        # processes that end with a group alive abort now and then, those of stock DDP too
        multiprocessing.util.Finalize(None, _leave, exitpriority=1)

    def on_fit_end(self, trainer: pl.Trainer, module: Any) -> None:
        rank, world = trainer.global_rank, trainer.world_size
        out = {"before": self.before, "after": self._loss(module), "equal": ranks_equal(module), "world_size": world}
        self.path.with_name(f"{self.path.name}-{rank}.json").write_text(json.dumps(out))

    @torch.no_grad()
    def _loss(self, module: Any) -> float:
        return float(Net.loss(module, next(iter(loader(64, seed=4)))))


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def strategies(way: str) -> dict[str, Any]:
    """What Trainer(strategy=) takes, by what is exchanged."""
    if way == "cli":
        return {"ddp": "ddp", "updates": yaml.safe_load(UPDATES), "gradients": yaml.safe_load(GRADIENTS)}
    options = {} if way in ("popen", "torchrun") else {"start_method": way}
    return {
        "ddp": pl.strategies.DDPStrategy(**options),
        "updates": ls.SparseDDPStrategy(exchange=ls.Updates(), **options),
        "gradients": ls.SparseDDPStrategy(exchange=ls.Gradients(), density=0.1, **options),
    }


def run(folder: Path, way: str, ranks: int) -> None:
    faulthandler.dump_traceback_later(120, exit=True)
    for name, strategy in strategies(way).items():
        options: dict[str, Any] = {
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": ranks,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        report = Report(folder / f"{way}-{ranks}-{name}")
        if way == "cli":
            config = folder / f"{name}.yaml"
            config.write_text(yaml.safe_dump({"trainer": options}))
            args = ["fit", "--config", str(config)]
            LightningCLI(WithData, trainer_defaults={"callbacks": [report]}, save_config_callback=None, args=args)
        else:
            pl.Trainer(callbacks=[report], **options).fit(WithData())
    _leave()


def table(folder: Path) -> str:
    """Markdown, of the files that the ranks of every start have written."""
    lines = ["| ranks | `Updates()` | `Gradients()` |", "|---|---|---|"]
    for name, start in STARTS.items():
        lines.append(f"| {name} | " + " | ".join(verdict(folder, start, way) for way in TAPS) + " |")
    return "\n".join(lines)


def verdict(folder: Path, start: Start, way: str) -> str:
    """One cell: "as DDP", or what is wrong."""
    mine, ddp = (
        [json.loads((folder / f"{start.way}-{start.ranks}-{x}-{rank}.json").read_text()) for rank in range(start.ranks)]
        for x in (way, "ddp")
    )
    if not all(
        rank["equal"] and rank["world_size"] == start.ranks and rank["after"] == mine[0]["after"] for rank in mine
    ):
        return "ranks differ"
    if start.ranks == 1:
        return "as DDP" if mine == ddp else "not DDP bit for bit"
    gained = (mine[0]["before"] - mine[0]["after"]) / (ddp[0]["before"] - ddp[0]["after"])
    return "as DDP" if gained > ENOUGH else f"learned {gained:.2f} of what DDP did"


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
