"""Trains small models with and without the callbacks, and writes what each rank saw to a file.

Run by `test_monitor.py` as a script, once for each way Lightning starts its ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from lightning_sparse.checksum import checksum

RANKS = 2
STEPS = 12
# spawned ranks import this file again, with the same arguments
pl: Any = importlib.import_module({"popen": "pytorch_lightning", "spawn": "lightning.pytorch"}[sys.argv[1]])


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8 * RANKS * STEPS, 32, generator=generator)
    return DataLoader(TensorDataset(x, torch.tanh(x[:, :10])), batch_size=8)


class Net(pl.LightningModule):
    """Two hidden layers; trained by hand with two optimizers if asked to."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 10)
        self.optimizer = optimizer
        self.automatic_optimization = optimizer != "manual"

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1])
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "manual":
            return [torch.optim.AdamW(part.parameters(), lr=3e-3) for part in (self.body, self.head)]
        build = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[self.optimizer]
        return build(self.parameters(), lr=0.01)


def fit(strategy: Any, optimizer: str, callbacks: list[Any], **options: Any) -> dict[str, Any]:
    """One run: the weights' checksum, the metrics, and what was printed and warned about."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_epochs": 1,
        "val_check_interval": 5,
        "limit_val_batches": 2,
        "log_every_n_steps": 4,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": any(isinstance(callback, pl.callbacks.RichProgressBar) for callback in callbacks),
    }
    net, out = Net(optimizer), io.StringIO()
    trainer = pl.Trainer(strategy=strategy, callbacks=callbacks, **defaults | options)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
        warnings.simplefilter("always")
        trainer.fit(net, data(), data())
    return {
        "weights": checksum(net),
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "printed": out.getvalue(),
        "warned": [str(warning.message) for warning in caught if "DensityMonitor" in str(warning.message)],
        "summary": trainer.strategy.summary() if hasattr(trainer.strategy, "summary") else {},
    }


def sparse(optimizer: str) -> Any:
    # several buckets, so that the newest exchange is not the whole model
    if optimizer == "manual":
        return "sparse_ddp"
    exchange = ls.Gradients() if optimizer == "sgd" else "auto"
    return ls.SparseDDPStrategy(density=0.05, exchange=exchange, compressor=ls.TopK(), bucket_cap_mb=0.01)


def popen(folder: Path) -> None:
    results = {}
    for optimizer in ("adamw", "sgd", "manual"):
        results[f"{optimizer} alone"] = fit(sparse(optimizer), optimizer, [])
        callbacks = [ls.DensityMonitor(per_layer=optimizer == "sgd")]
        if optimizer == "adamw":
            callbacks.append(ls.SparseProgressBar())
        logger = optimizer != "manual" and pl.loggers.CSVLogger(folder, name=optimizer, version=0)
        results[f"{optimizer} watched"] = fit(sparse(optimizer), optimizer, callbacks, logger=logger)
    results["ddp"] = fit("ddp", "adamw", [ls.DensityMonitor(), ls.SparseProgressBar()])
    torch.save(results, folder / f"rank{torch.distributed.get_rank()}.pt")


def spawn(folder: Path) -> None:
    from lightning_sparse.lightning import DensityMonitor, SparseProgressBar

    callbacks = [DensityMonitor(every=3), SparseProgressBar()]
    results = {"spawn": fit("sparse_ddp_spawn", "adamw", callbacks)}
    results["one rank"] = fit("sparse_ddp", "adamw", callbacks, devices=1)
    torch.save(results, folder / "rank0.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"popen": popen, "spawn": spawn}[sys.argv[1]](Path(sys.argv[2]))
