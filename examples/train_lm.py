"""Trains a byte-level GPT on the sources of the Python standard library.

python examples/train_lm.py                      # sparse_ddp, on two CPU processes or all GPUs
python examples/train_lm.py --compare ddp        # the same with dense DDP beside it
"""

import functools
import math
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from cli import make_parser, parse
from common import Row, main
from corpus import VALIDATION_SEED, Windows, read
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader

CONTEXT = 128
SIZES = {"tiny": (64, 2, 2), "small": (128, 4, 4), "medium": (256, 6, 8), "large": (512, 8, 8)}  # width, layers, heads
LR_WARMUP_STEPS = 30
VALIDATION_WINDOWS = 240  # divisible by 1 to 6 ranks, so that the sampler repeats none
VALIDATION_BATCH = 20


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # [batch, t, 3, heads, width / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch, heads, t, width / heads] each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(pl.LightningModule):
    """A byte-level GPT with AdamW, warm-up, and a constant or cosine learning rate."""

    def __init__(self, size: str, lr: float, schedule: str, max_steps: int) -> None:
        super().__init__()
        width, layers, heads = SIZES[size]
        self.lr, self.schedule, self.max_steps = lr, schedule, max_steps
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.blocks(self.bytes(text) + self.positions)  # [batch, t, width]
        return self.head(self.norm(hidden))  # [batch, t, 256]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, following = batch
        return F.cross_entropy(self(text).flatten(0, 1), following.flatten())

    def _lr_factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / LR_WARMUP_STEPS)
        return warmup * (0.5 * (1 + math.cos(math.pi * step / self.max_steps)) if self.schedule == "cosine" else 1.0)


def make_loaders(batch_size: int, max_steps: int, seed: int, world_size: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of exactly one run's training windows and of the fixed validation windows."""
    train_text, val_text = read()
    train = Windows(train_text, CONTEXT, seed, max_steps * batch_size * world_size)
    val = Windows(val_text, CONTEXT, VALIDATION_SEED, VALIDATION_WINDOWS)
    return DataLoader(train, batch_size), DataLoader(val, VALIDATION_BATCH)


def problem(
    seed: int, lr: float, max_steps: int, world_size: int, model_size: str = "small", batch_size: int = 16
) -> dict[str, Any]:
    """What `python -m lightning_sparse bench convergence` trains: the same model and data, on virtual ranks."""
    pl.seed_everything(seed, verbose=False)
    train, val = make_loaders(batch_size, max_steps, seed, world_size)
    return {"module": GPT(model_size, lr, "cosine", max_steps), "train": train, "val": val, "clip": 1.0}


if __name__ == "__main__":
    parser = make_parser(__doc__.split("\n")[0], max_steps=300, batch_size=16, lr=1e-3)
    parser.add_argument(
        "--model-size", choices=list(SIZES), default="small", help="about 0.14, 0.9, 5 or 25 M parameters"
    )
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine", help="after the warm-up")
    options = parse(parser)

    def extend(row: Row) -> Row:
        return {"val_bits_per_byte": row["val_loss"] / math.log(2), "model_size": options.model_size}

    main(
        options,
        lambda: GPT(options.model_size, options.lr, options.schedule, options.max_steps),
        functools.partial(make_loaders, options.batch_size, options.max_steps, options.seed),
        extend,
        gradient_clip_val=1.0,
    )
