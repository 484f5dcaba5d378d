"""What `bench network` trains: a plain network of chosen width, or the problem of an example script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.bench.example import load_problem
from lightning_sparse.bench.simulate import Problem

LAYERS = 6
BATCH = 16
LR = 1e-3


class MLP(pl.LightningModule):
    """Square layers with ReLUs between, trained with AdamW on random targets: many weights, little arithmetic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), LR)


def make_problem(model: str, options: dict[str, Any], steps: int, world_size: int) -> Problem:
    """Module and loaders of one run of ``steps`` steps: ``mlp``, or ``lm`` for an example script."""
    if model == "lm":
        make = load_problem(Path(options["example"]))
        return Problem(**make(seed=0, lr=LR, max_steps=steps, world_size=world_size, **options["arguments"]))
    pl.seed_everything(0, verbose=False)
    samples = torch.randn(2, steps * BATCH * world_size, options["width"])
    train = DataLoader(TensorDataset(*samples), BATCH)
    return Problem(MLP(options["width"]), train, train)
