"""Trains a small convolutional network with batch norm on scikit-learn's digits, with SGD and momentum.

python examples/train_digits.py --compare ddp
python examples/train_digits.py --exchange gradients --memory momentum      # the memory applies the momentum
"""

import functools
import zlib
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from cli import make_parser, parse
from common import main
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VALIDATION_IMAGES = 360  # divisible by 1 to 6 ranks, so that the sampler repeats none


class ConvNet(pl.LightningModule):
    """Two convolutions with batch norm and two linear layers, for 8 x 8 images."""

    def __init__(self, lr: float, momentum: float) -> None:
        super().__init__()
        self.lr, self.momentum = lr, momentum
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1024, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # [batch, 10]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, digits = batch
        scores = self(images)
        metrics = {
            "val_loss": F.cross_entropy(scores, digits),
            "val_accuracy": (scores.argmax(-1) == digits).float().mean(),
        }
        self.log_dict(metrics, prog_bar=True, sync_dist=True, batch_size=len(images))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=self.momentum)


def split() -> tuple[list[int], list[int]]:
    """Training and validation indices, the same on every machine."""
    order = sorted(range(1797), key=lambda index: zlib.crc32(str(index).encode()))
    return order[VALIDATION_IMAGES:], order[:VALIDATION_IMAGES]


def make_loaders(batch_size: int, world_size: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of the training images, shuffled, and of the validation images."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16  # [1797, 1, 8, 8]
    targets = torch.from_numpy(digits.target).long()  # [1797]
    train, val = (TensorDataset(images[part], targets[part]) for part in split())
    if batch_size * world_size > len(train):
        raise ValueError(f"--batch-size expected at most {len(train) // world_size} images per rank, got {batch_size}")
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(val, 64)


def problem(seed: int, lr: float, max_steps: int, world_size: int) -> dict[str, Any]:
    """What `python -m lightning_sparse bench convergence` trains: the same model and data, on virtual ranks."""
    pl.seed_everything(seed, verbose=False)
    train, val = make_loaders(32, world_size)
    return {"module": ConvNet(lr, momentum=0.9), "train": train, "val": val}


if __name__ == "__main__":
    options = parse(make_parser(__doc__.split("\n")[0], max_steps=300, batch_size=32, lr=0.05))
    main(
        options,
        lambda: ConvNet(options.lr, momentum=0.0 if options.memory == "momentum" else 0.9),
        functools.partial(make_loaders, options.batch_size),
    )
