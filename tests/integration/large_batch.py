"""Trains with `LargeBatchLR`, `LARS` and `LAMB` on real ranks, and writes what each rank saw to a file.

python large_batch.py TREE RANKS FOLDER    Lightning starts the other ranks by running it again.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from lightning_sparse.optim import LAMB, LARS, PTO, Serial

BATCH, STEPS = 8, 24
LR = 2.0**-7
home: Any = importlib.import_module(f"lightning_sparse.{sys.argv[1]}")
pl: Any = importlib.import_module(home.SparseDDPStrategy._tree)

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p, lr, _: torch.optim.SGD(p, lr, momentum=0.9),
    "adamw": lambda p, lr, _: torch.optim.AdamW(p, lr),
    "lars": lambda p, lr, operator: LARS(p, lr, trust_coefficient=1.0, operator=operator),
    "lamb": lambda p, lr, operator: LAMB(p, lr, operator=operator),
}


class Net(pl.LightningModule):
    """Two layers; remembers losses, and the rates of each step."""

    def __init__(self, optimizer: str, lr: float = LR, operator: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
        self.options = optimizer, lr, operator
        self.rates: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        # within the step: the rates that it is made with
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        name, lr, operator = self.options
        optimizer = OPTIMIZERS[name](self.parameters(), lr, operator)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.5), "interval": "step"}]


def fit(net: Net, strategy: Any, *callbacks: Any, path: Path | None = None, **options: Any) -> dict[str, Any]:
    ranks = int(sys.argv[2])
    x = torch.randn(BATCH * ranks * STEPS, 32, generator=torch.Generator().manual_seed(3))
    defaults = {"max_epochs": 1, "enable_checkpointing": False}
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **defaults | options,
    )
    trainer.fit(net, DataLoader(TensorDataset(x, torch.tanh(x[:, :10])), BATCH), ckpt_path=path, weights_only=True)
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return {"weights": weights, "rates": net.rates, "losses": net.losses}


def strategy(exchange: str) -> Any:
    chosen = {"updates": ls.Updates(), "gradients": ls.Gradients()}[exchange]
    return home.SparseDDPStrategy(density=0.01, exchange=chosen)


def two_ranks(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for exchange in ("updates", "gradients"):
        for optimizer in OPTIMIZERS:
            callback = home.LargeBatchLR(base_batch=BATCH)
            results[f"{exchange} {optimizer} scaled"] = fit(Net(optimizer), strategy(exchange), callback)
            results[f"{exchange} {optimizer} by hand"] = fit(Net(optimizer, 2 * LR), strategy(exchange))
    for optimizer in ("lars", "lamb"):
        for operator in (Serial(), PTO()):
            name = f"{optimizer} {type(operator).__name__}"
            results[name] = fit(Net(optimizer, operator=operator), strategy("gradients")) | {"work": operator.elements}
        with pytest.raises(ValueError, match=r"expected no PTO\(\) with Updates, .* got one in L"):
            fit(Net(optimizer, operator=PTO()), strategy("updates"))
    saver = pl.callbacks.ModelCheckpoint(folder, filename="saved")
    callback = home.LargeBatchLR(base_batch=BATCH, warmup_steps=STEPS)
    results["warm-up"] = fit(Net("adamw"), strategy("updates"), callback, saver, enable_checkpointing=True)
    return results


def one_rank(folder: Path) -> dict[str, Any]:
    callback = home.LargeBatchLR(base_batch=BATCH, warmup_steps=STEPS)
    return {"resumed": fit(Net("adamw"), strategy("updates"), callback, path=folder / "saved.ckpt", max_epochs=2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[3])
    found = two_ranks(place) if sys.argv[2] == "2" else one_rank(place)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(found, place / f"{sys.argv[2]}ranks-{rank}.pt")
