"""Predicts the next word of the Python standard library, with every word of its text as a class.

python examples/train_slide.py
python examples/train_slide.py --variants softmax lsh --batch-size 128
"""

import collections
import re
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from corpus import VALIDATION_SEED, offset, read
from layers import Loaders, compare, make_parser
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_sparse.nn import LSHLinear

VARIANTS = ["softmax", "lsh", "sampled"]
WORDS = re.compile(r"\w+|[^\w\s]")
CONTEXT = 6
EMBEDDING = 64
HIDDEN = 128
VALIDATION_WORDS = 2000


class NextWord(pl.LightningModule):
    """Embeddings of the last words, one hidden layer, and an output layer over all words."""

    def __init__(self, output: nn.Linear, lr: float) -> None:
        super().__init__()
        self.lr = lr
        # two optimizers, for gradients of two layouts
        self.automatic_optimization = False
        self.words = nn.Embedding(output.out_features, EMBEDDING, sparse=True)
        self.hidden = nn.Sequential(nn.Linear(CONTEXT * EMBEDDING, HIDDEN), nn.ReLU())
        self.output = output

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self._loss(batch))
        for optimizer in optimizers:
            optimizer.step()

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        sparse = list(self.words.parameters())
        dense = list(self.hidden.parameters())
        (sparse if isinstance(self.output, LSHLinear) else dense).extend(self.output.parameters())
        return [torch.optim.SparseAdam(sparse, self.lr), torch.optim.Adam(dense, self.lr)]

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        context, word = batch
        hidden = self.hidden(self.words(context).flatten(1))  # [batch, hidden]
        if isinstance(self.output, LSHLinear):
            return self.output.loss(hidden, word)
        return F.cross_entropy(self.output(hidden), word)


class Words(Dataset):
    """The words before a place of the text, and the word there; item i's place is drawn from (seed, i) alone."""

    def __init__(self, text: Tensor, places: Tensor, seed: int, length: int) -> None:
        self.text, self.places, self.seed, self.length = text, places, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = int(self.places[offset(self.seed, index) % len(self.places)])
        return self.text[place - CONTEXT : place], self.text[place]


def read_words() -> tuple[Tensor, Tensor, int]:
    """Training and validation text as word numbers, [n] int64, and how many words there are.

    Words are numbered by how often the training text has them, from 1; 0 stands for words that it has not.
    """
    texts = [WORDS.findall(bytes(text.tolist()).decode(errors="replace")) for text in read()]
    counts = collections.Counter(texts[0])
    # ties in the order of the alphabet, so that numbers do not depend on the order of files
    numbers = {word: i + 1 for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    train, val = (torch.tensor([numbers.get(word, 0) for word in text]) for text in texts)
    return train, val, len(numbers) + 1


def make_output(variant: str, words: int, options: Any) -> nn.Linear:
    """The layer of a variant; all have the same parameters."""
    if variant == "softmax":
        return nn.Linear(HIDDEN, words)
    if variant == "lsh":
        return LSHLinear(
            HIDDEN, words, tables=options.tables, bucket=options.bucket, tail=options.tail, seed=options.seed
        )
    # as many classes, drawn at random: what the tables are worth
    likely = options.batch_size * options.tables * options.bucket // 2
    return LSHLinear(HIDDEN, words, tables=1, bits=16, bucket=1, tail=options.tail + likely, seed=options.seed)


def make_loaders(train: Tensor, val: Tensor, batch_size: int, max_steps: int, seed: int) -> Loaders:
    """Loaders of the training words and of fixed validation words, which the training text has."""
    known = CONTEXT + val[CONTEXT:].nonzero().view(-1)
    everywhere = torch.arange(CONTEXT, len(train))
    return (
        DataLoader(Words(train, everywhere, seed, max_steps * batch_size), batch_size),
        DataLoader(Words(val, known, VALIDATION_SEED, VALIDATION_WORDS), 250),
    )


def main(arguments: list[str] | None = None) -> None:
    """Trains what the command line asks for."""
    parser = make_parser(__doc__.split("\n")[0], VARIANTS, max_steps=1500, batch_size=64, lr=1e-3)
    parser.add_argument("--tables", type=int, default=8, help="hash tables")
    parser.add_argument("--bucket", type=int, default=16, help="words taken of each bucket, at most")
    parser.add_argument("--tail", type=int, default=1024, help="words drawn at random in each step")
    options = parser.parse_args(arguments)
    train, val, words = read_words()
    compare(
        options,
        lambda variant: NextWord(make_output(variant, words, options), options.lr),
        lambda max_steps: make_loaders(train, val, options.batch_size, max_steps, options.seed),
    )


if __name__ == "__main__":
    main()
