"""What Lightning lets a user do, with both taps on two real ranks, against stock DDP; writes a file and prints a table.

python tests/integration/modes.py FOLDER       # Lightning starts the other rank
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from lightning_sparse.checksum import ranks_equal

RANKS, STEPS, BATCH = 2, 24, 8
TAPS = ("updates", "gradients")
ENOUGH = 0.7
"""Of what DDP's loss falls in so few steps."""


class Net(pl.LightningModule):
    """Regression that a few steps of AdamW improve."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0].to(self.head.weight.dtype)).float(), batch[1].float())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Manual(Net):
    every = 1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / self.every)
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()


class ManualAccumulation(Manual):
    every = 3


class Gan(Manual):
    """A second network tells predictions from targets; each step trains one of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        fake = self(batch[0])
        self.manual_backward(self.loss(batch) - 0.01 * self.critic(fake).mean())
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        self.manual_backward((self.critic(fake.detach()) - 1).square().mean() + self.critic(batch[1]).square().mean())
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)

    def configure_optimizers(self) -> Any:
        ours = [*self.body.parameters(), *self.head.parameters()]
        return [torch.optim.AdamW(ours, lr=0.01), torch.optim.AdamW(self.critic.parameters(), lr=0.01)]


class Branch(Net):
    """A branch that takes part where ``takes_part`` says so."""

    def __init__(self, takes_part: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.branch, self.takes_part = nn.Linear(32, 10), takes_part

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.branch(x) if self.takes_part(self.global_rank, self.global_step) else out


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


class Thawed(Frozen):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.body.requires_grad_(True)


class Image(Net):
    """A convolution in channels-last memory, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 2, 3))
        self.body = nn.Sequential(layers.to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(24, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 4, 8).to(memory_format=torch.channels_last)))


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body, backend="aot_eager")


class Rows(Net):
    """Row-sparse gradients; on the second rank none at all in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 32, sparse=True, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0].abs() * 60).long().clamp(max=199)
        if self.global_rank == 1 and self.global_step % 2:
            rows = torch.zeros_like(rows)
        return super().forward(x + self.table(rows))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Odd(Net):
    """Parameters of no element, of no dimension, and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(()))
        self.single = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scalar * self.single + self.empty.sum()


@dataclass(frozen=True)
class Mode:
    """A way to train: a module, options of the Trainer and of the strategy, and what else is done."""

    make: Callable[[], Net] = Net
    trainer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    samples: int = BATCH * RANKS * STEPS
    fits: int = 1
    refused: dict[str, str] = field(default_factory=dict)


UNUSED = {"find_unused_parameters": True}
MODES: dict[str, Mode] = {
    "automatic optimization": Mode(),
    "manual optimization": Mode(Manual),
    "several optimizers, toggled (GAN)": Mode(Gan, ddp=UNUSED),
    "`accumulate_grad_batches`": Mode(trainer={"accumulate_grad_batches": 3}),
    "accumulation by hand": Mode(ManualAccumulation),
    "clipping by norm": Mode(trainer={"gradient_clip_val": 0.1}),
    "clipping by value": Mode(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "`bf16-mixed`": Mode(trainer={"precision": "bf16-mixed"}),
    "`bf16-true`": Mode(trainer={"precision": "bf16-true"}),
    "loss scaling (GradScaler)": Mode(trainer={"plugins": "scaler"}),
    "`static_graph`": Mode(ddp={"static_graph": True}),
    "parameters unused on one rank": Mode(lambda: Branch(lambda rank, step: rank == 0), ddp=UNUSED),
    "parameters unused on all ranks": Mode(lambda: Branch(lambda rank, step: False), ddp=UNUSED),
    "parameters unused in every other step": Mode(lambda: Branch(lambda rank, step: step % 2 == 0), ddp=UNUSED),
    "frozen layers": Mode(Frozen),
    "layers unfrozen while training": Mode(Thawed, refused={"gradients": "to stay frozen, as it was when fit began"}),
    "`gradient_as_bucket_view=False`": Mode(ddp={"gradient_as_bucket_view": False}),
    "`gradient_as_bucket_view=True`": Mode(ddp={"gradient_as_bucket_view": True}),
    "many small buckets": Mode(ddp={"bucket_cap_mb": 0.002}),
    "channels-last convolutions, batch norm": Mode(Image),
    "activation checkpointing": Mode(Recomputed),
    "compiled submodules": Mode(Compiled),
    "`nn.Embedding(sparse=True)`": Mode(Rows),
    "parameters of 0 and 1 elements": Mode(Odd),
    "uneven inputs": Mode(samples=BATCH * RANKS * STEPS - 13),
    "two `fit` calls": Mode(fits=2),
}


def loader(samples: int, seed: int = 3) -> DataLoader:
    x = torch.randn(samples, 32, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, torch.tanh(x[:, :10] - x[:, 10:20])), batch_size=BATCH)


def train(mode: Mode, strategy: Any) -> dict[str, Any]:
    """Losses before and after, and whether ranks agree; then validate, test and predict with the same Trainer."""
    net, val = mode.make(), loader(64, seed=4)
    options = dict(mode.trainer)
    if options.get("plugins") == "scaler":
        plugin = pl.plugins.MixedPrecision("bf16-mixed", "cpu")
        plugin.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        options["plugins"] = [plugin]
    fixed = {"accelerator": "cpu", "devices": RANKS, "max_epochs": 1, "logger": False, "num_sanity_val_steps": 0}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with torch.no_grad():
        before = float(Net.loss(net, next(iter(val))))
    for _ in range(mode.fits):
        trainer = pl.Trainer(strategy=strategy(), **fixed, **quiet, **options)
        trainer.fit(net, loader(mode.samples))
    equal = ranks_equal(net)
    after = trainer.validate(net, val, verbose=False)[0]["val_loss"]
    again = trainer.test(net, val, verbose=False)[0]["val_loss"]
    predicted = trainer.predict(net, val)
    return {"before": before, "after": after, "again": again, "equal": equal, "batches": len(predicted)}


def run(folder: Path) -> None:
    """Every mode with every strategy."""
    faulthandler.dump_traceback_later(280, exit=True)
    results: dict[str, Any] = {}
    for name, mode in MODES.items():
        makers = {
            "ddp": lambda mode=mode: pl.strategies.DDPStrategy(**mode.ddp),
            "updates": lambda mode=mode: ls.SparseDDPStrategy(exchange=ls.Updates(), **mode.ddp),
            "gradients": lambda mode=mode: ls.SparseDDPStrategy(exchange=ls.Gradients(), density=0.1, **mode.ddp),
        }
        results[name] = {}
        for way, make in makers.items():
            try:
                results[name][way] = train(mode, make)
            except Exception as error:
                # the table says which
                results[name][way] = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"modes{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def verdict(mode: Mode, result: dict[str, Any], way: str) -> str:
    """One cell: "as DDP", "refused", or what is wrong."""
    mine, ddp = result[way], result["ddp"]
    if way in mode.refused:
        return "refused" if mode.refused[way] in mine.get("error", "") else f"not refused: {mine}"
    if "error" in mine or "error" in ddp:
        return f"failed: {mine.get('error', ddp.get('error'))}"
    if not mine["equal"]:
        return "ranks differ"
    if not (mine["after"] == mine["again"] and mine["batches"] > 0):
        return "test or predict see other weights"
    gained = (mine["before"] - mine["after"]) / (ddp["before"] - ddp["after"])
    return "as DDP" if gained > ENOUGH else f"learned {gained:.2f} of what DDP did"


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| mode | `Updates()` | `Gradients()` |", "|---|---|---|"]
    for name, mode in MODES.items():
        lines.append(f"| {name} | " + " | ".join(verdict(mode, results[name], way) for way in TAPS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(table(json.loads((Path(sys.argv[1]) / "modes0.json").read_text())))
