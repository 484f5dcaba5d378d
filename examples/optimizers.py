"""The language model under other optimizers, for `python -m lightning_sparse bench convergence --example`.

--set optimizer=NAME picks one of OPTIMIZERS. Under "muon" the matrices of the blocks are Muon's, the rest is AdamW's.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_optimizer import Lion
from torch import nn
from train_lm import GPT, make_loaders

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda weights, lr: torch.optim.AdamW(weights, lr, betas=(0.9, 0.95), weight_decay=0.01),
    "adam": lambda weights, lr: torch.optim.Adam(weights, lr, betas=(0.9, 0.95)),
    "sgd": lambda weights, lr: torch.optim.SGD(weights, lr, momentum=0.9),
    "lion": lambda weights, lr: Lion(weights, lr, betas=(0.9, 0.99), weight_decay=0.01),
    "muon": lambda weights, lr: torch.optim.Muon(weights, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
}


class Variant(GPT):
    """The same model and schedule, another optimizer."""

    def __init__(self, optimizer: str, lr: float, max_steps: int) -> None:
        super().__init__("small", lr, "cosine", max_steps)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        shares = {self.optimizer: list(self.parameters())}
        if self.optimizer == "muon":
            matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
            known = {id(p) for p in matrices}
            shares = {"muon": matrices, "adamw": [p for p in self.parameters() if id(p) not in known]}
        optimizers = [OPTIMIZERS[name](weights, self.lr) for name, weights in shares.items()]
        schedulers = [torch.optim.lr_scheduler.LambdaLR(x, self._lr_factor) for x in optimizers]
        return optimizers, [{"scheduler": x, "interval": "step"} for x in schedulers]


def problem(
    seed: int, lr: float, max_steps: int, world_size: int, optimizer: str = "adamw", batch_size: int = 4
) -> dict[str, Any]:
    """What the bench trains."""
    pl.seed_everything(seed, verbose=False)
    train, val = make_loaders(batch_size, max_steps, seed, world_size)
    return {"module": Variant(optimizer, lr, max_steps), "train": train, "val": val, "clip": 1.0}
