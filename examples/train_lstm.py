"""Trains an LSTM on the characters of the Python standard library, with dense and with sparse gate gradients.

python examples/train_lstm.py
python examples/train_lstm.py --variants dense sparse --density 0.25
"""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from corpus import VALIDATION_SEED, Windows, read
from layers import Loaders, compare, make_parser
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse.nn import SparseLSTM
from lightning_sparse.schedules import cycle

VARIANTS = ["dense", "sparse", "mixed"]  # "mixed" makes every second step densely
CONTEXT = 64
EMBEDDING = 128
VALIDATION_WINDOWS = 160


class CharLSTM(pl.LightningModule):
    """An embedding of bytes, one LSTM layer, and a linear layer."""

    def __init__(self, lstm: nn.LSTM, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.bytes = nn.Embedding(256, EMBEDDING)
        self.lstm = lstm
        self.head = nn.Linear(lstm.hidden_size, 256)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0.01)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, following = batch
        hidden, _ = self.lstm(self.bytes(text))  # [batch, t, hidden]
        return F.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())


def make_lstm(variant: str, hidden: int, density: float) -> nn.LSTM:
    """The layer of a variant; all have the same parameters."""
    if variant == "dense":
        return nn.LSTM(EMBEDDING, hidden, batch_first=True)
    schedule = density if variant == "sparse" else cycle(1.0, density)
    return SparseLSTM(EMBEDDING, hidden, batch_first=True, density=schedule)


def make_loaders(batch_size: int, max_steps: int, seed: int) -> Loaders:
    """Loaders of the training windows and of the fixed validation windows."""
    train_text, val_text = read()
    train = Windows(train_text, CONTEXT, seed, max_steps * batch_size)
    return DataLoader(train, batch_size), DataLoader(
        Windows(val_text, CONTEXT, VALIDATION_SEED, VALIDATION_WINDOWS), 32
    )


def main(arguments: list[str] | None = None) -> None:
    """Trains what the command line asks for."""
    parser = make_parser(__doc__.split("\n")[0], VARIANTS, max_steps=300, batch_size=32, lr=2e-3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--density", type=float, default=0.5, help="fraction of gate gradients kept")
    options = parser.parse_args(arguments)
    compare(
        options,
        lambda variant: CharLSTM(make_lstm(variant, options.hidden, options.density), options.lr),
        lambda max_steps: make_loaders(options.batch_size, max_steps, options.seed),
    )


if __name__ == "__main__":
    main()
