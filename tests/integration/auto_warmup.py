"""Trains under AutoWarmup on two real ranks, and writes what each rank saw to a file.

python auto_warmup.py {popen|spawn} FOLDER

Run by `test_auto_warmup.py`. "popen" uses pytorch_lightning, "spawn" the other tree.
"""

from __future__ import annotations

import faulthandler
import importlib
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from lightning_sparse.checksum import checksum

RANKS = 2
EPOCHS, BATCHES = 5, 33  # no multiple of the steps between tests
BEST = 0.02
# spawned ranks import this file again, with the same arguments
IS_SPAWN = sys.argv[1:2] == ["spawn"]
pl: Any = importlib.import_module("lightning.pytorch" if IS_SPAWN else "pytorch_lightning")
HOME: Any = importlib.import_module("lightning_sparse.lightning" if IS_SPAWN else "lightning_sparse.pytorch_lightning")


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4 * RANKS * BATCHES, 32, generator=generator)
    return DataLoader(TensorDataset(x, torch.tanh(x[:, :10])), batch_size=4)


class Net(pl.LightningModule):
    """A loss that is a V over the logarithm of the rate, with noise of each rank's own, whatever the weights are."""

    def __init__(self, diverges: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, 10)
        self.diverges, self.passes = diverges, 0
        self.rates: list[list[float]] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        groups = self.trainer.strategy.optimizers[0].param_groups
        rates = [float(group["lr"]) for group in groups]
        self.rates.append(rates)
        seed = 1000 * self.global_rank + self.passes + self.trainer.current_epoch * 100_000
        self.passes += 1
        noise = torch.randn((), generator=torch.Generator().manual_seed(seed))
        value = 2 + 0.4 * abs(math.log(max(rates[0], 1e-30) / BEST)) + 0.05 * noise
        if self.diverges and rates[0] > BEST and self.global_rank == 1:
            value = value * math.nan
        return value + 0.0 * self.head(torch.tanh(self.body(batch[0]))).sum()

    def on_train_epoch_start(self) -> None:
        self.passes = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [{"params": self.body.parameters(), "lr": 0.4}, {"params": self.head.parameters()}], lr=0.1
        )


class Real(Net):
    """A loss of the weights."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        super().training_step(batch)
        return nn.functional.mse_loss(self.head(torch.tanh(self.body(batch[0]))), batch[1])


class Before(pl.Callback):
    """Takes the state down where the run is saved."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        rule = next(c for c in trainer.callbacks if isinstance(c, HOME.AutoWarmup))
        self.saved.append(len(rule._pending))


def fit(module: Any, strategy: Any, callbacks: list[Any] | None = None, **options: Any) -> dict[str, Any]:
    """One run under AutoWarmup."""
    rule = HOME.AutoWarmup(test_every=4, growth=0.6, patience=2)
    before = Before()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 10,
    }
    resume = options.pop("ckpt_path", None)
    trainer = pl.Trainer(strategy=strategy, callbacks=[rule, before, *(callbacks or [])], **{**defaults, **options})
    trainer.fit(module, data(), ckpt_path=resume)
    assert rule.warmup is not None
    return {
        "rates": module.rates,
        "end": rule.warmup.end,
        "peak": rule.warmup.peak,
        "steps": rule.steps,
        "saved": before.saved,
        "last": rule.lr,
        "checksum": checksum(module),
        "metrics": {key: float(x) for key, x in trainer.callback_metrics.items()},
    }


def sparse(exchange: Any) -> Any:
    return HOME.SparseDDPStrategy(density=0.01, exchange=exchange, residual_checkpoint="exact")


def popen(folder: Path) -> dict[str, Any]:
    out = {"ddp": fit(Net(), "ddp")}
    out["updates"] = fit(Net(), sparse(ls.Updates()))
    out["gradients"] = fit(Net(), sparse(ls.Gradients()))
    out["accumulated"] = fit(Net(), "sparse_ddp", accumulate_grad_batches=2, max_epochs=2 * EPOCHS)
    out["diverges"] = fit(Net(diverges=True), sparse(ls.Updates()))
    out["real"] = fit(Real(), sparse(ls.Updates()))
    save = pl.callbacks.ModelCheckpoint(
        folder, save_top_k=-1, filename="{epoch}", every_n_epochs=1, save_on_train_epoch_end=True
    )
    out["whole"] = fit(Net(), sparse(ls.Updates()), [save], enable_checkpointing=True)
    for epoch in (1, 3):
        out[f"from {epoch}"] = fit(Net(), sparse(ls.Updates()), ckpt_path=str(folder / f"epoch={epoch}.ckpt"))
    return out


def spawn(folder: Path) -> dict[str, Any]:
    results = {"one rank": fit(Net(), "auto", devices=1, max_epochs=3)}
    module = Net()
    trainer = pl.Trainer(
        strategy="sparse_ddp_spawn",
        accelerator="cpu",
        devices=RANKS,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=10,
        callbacks=[HOME.AutoWarmup(test_every=4, growth=0.6, patience=2)],
    )
    trainer.fit(module, data())
    results["spawn"] = {"metrics": {key: float(x) for key, x in trainer.callback_metrics.items()}}
    return results


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(150, exit=True)
    folder = Path(sys.argv[2])
    results = {"popen": popen, "spawn": spawn}[sys.argv[1]](folder)
    rank = 0 if IS_SPAWN else torch.distributed.get_rank()
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
