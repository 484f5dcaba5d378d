"""Trains small models under AdaScaleLR on two real ranks, and writes what each rank saw to a file.

python adascale.py {popen|spawn} FOLDER

Run by `test_adascale.py`. "popen" uses pytorch_lightning, "spawn" the other tree, for runs on one rank too.
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_sparse as ls
from lightning_sparse.checksum import checksum
from lightning_sparse.optim import AdaScale
from lightning_sparse.optim.norms import squares
from tests.integration.guard_scenarios import script

RANKS = 2
STEPS = 24
BATCH = 8
# spawned ranks import this file again, with the same arguments
IS_SPAWN = sys.argv[1:2] == ["spawn"]
TREE = "lightning.pytorch" if IS_SPAWN else "pytorch_lightning"
pl: Any = importlib.import_module(TREE)
HOME: Any = importlib.import_module("lightning_sparse.lightning" if IS_SPAWN else "lightning_sparse.pytorch_lightning")


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * RANKS * STEPS, 32, generator=generator)
    noise = torch.randn(len(x), 10, generator=generator)
    return x, torch.tanh(x[:, :10]) + noise


def data() -> DataLoader:
    return DataLoader(TensorDataset(*samples()), batch_size=BATCH)


def data_of_one_rank() -> DataLoader:
    """What Lightning's sampler gives to two ranks, rank 0's batch of a step before rank 1's."""
    dataset = TensorDataset(*samples())
    orders = [list(DistributedSampler(dataset, RANKS, rank, shuffle=True, seed=0)) for rank in range(RANKS)]
    order = torch.tensor(orders).view(RANKS, STEPS, BATCH).transpose(0, 1).flatten()
    return DataLoader(dataset, batch_size=BATCH, sampler=order.tolist())


class Net(pl.LightningModule):
    """Two matrices, one of them averaged sparsely; a group for each layer."""

    def __init__(self, optimizer: str = "sgd", lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, 10)
        self.optimizer, self.lr = optimizer, lr
        self.bad: tuple[int, int] | None = None  # rank and step

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self.head(torch.tanh(self.body(batch[0]))), batch[1])
        return loss * math.nan if self.bad == (self.global_rank, self.global_step) else loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 2 * self.lr}]
        optimizer: Any = torch.optim.SGD(groups, lr=self.lr)
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=0.003)
        if self.optimizer == "wrapped":
            optimizer = AdaScale(optimizer, world_size=RANKS, average=lambda x: x, scale=1.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class History(pl.Callback):
    """Gains, scale-invariant steps, and learning rates behind every step, and those inside."""

    def __init__(self) -> None:
        self.gains: list[list[float]] = []
        self.state: list[dict[str, Any]] = []
        self.steps: list[float] = []
        self.scheduled: list[int] = []
        self.rates: list[list[float]] = []
        self.inside: list[list[float]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        optimizer = trainer.strategy.optimizers[0]
        inner = getattr(optimizer, "inner", optimizer)
        inner.register_step_pre_hook(lambda *_: self.inside.append([float(g["lr"]) for g in inner.param_groups]))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        rule = next(c for c in trainer.callbacks if isinstance(c, HOME.AdaScaleLR))
        gain = rule.gain
        self.gains.append([gain.value, gain.of_group(0), gain.of_group(1)])
        self.steps.append(gain.steps)
        self.state.append(gain.state_dict())
        self.scheduled.append(trainer.lr_scheduler_configs[0].scheduler.last_epoch)
        self.rates.append([float(group["lr"]) for group in trainer.optimizers[0].param_groups])


class Decompressed:
    """The estimate that the sparse mean would give, in the place of the mean of these gradients."""

    def __init__(self) -> None:
        self.each = self.mean = 0.0

    def before(self, job: Any) -> None:
        self.each += float(squares([*job.inputs, *job.dense_inputs]).sum())

    def after(self, outcome: Any) -> None:
        job = outcome.picked.job
        self.mean += float(squares([*job.inputs, *job.dense_inputs]).sum())


class Beside(pl.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.estimate = Decompressed()
        trainer.strategy.tap.observers.append(self.estimate)


def fit(module: Any, strategy: Any, callbacks: list[Any] | None = None, **options: Any) -> dict[str, Any]:
    """One run under AdaScaleLR, or under the callbacks that are given."""
    history = History()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 4,
    }
    train, resume = options.pop("train", None) or data(), options.pop("ckpt_path", None)
    rules = [HOME.AdaScaleLR()] if callbacks is None else callbacks
    trainer = pl.Trainer(strategy=strategy, callbacks=[*rules, history], **{**defaults, **options})
    trainer.fit(module, train, ckpt_path=resume)
    return {
        "gains": history.gains,
        "steps": history.steps,
        "state": history.state,
        "scheduled": history.scheduled,
        "rates": history.rates,
        "inside": history.inside,
        "weights": {name: x.detach().clone() for name, x in module.state_dict().items()},
        "checksum": checksum(module),
        "metrics": {key: float(x) for key, x in trainer.callback_metrics.items()},
        "global_step": trainer.global_step,
    }


def gradients(density: Any, **options: Any) -> Any:
    return HOME.SparseDDPStrategy(density=density, exchange=ls.Gradients(), bucket_cap_mb=0.005, **options)


def sparse(exchange: Any) -> Any:
    return HOME.SparseDDPStrategy(density=0.01, exchange=exchange, residual_checkpoint="exact")


def scaler() -> Any:
    plugin = pl.plugins.precision.MixedPrecision("16-mixed", "cpu")
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return plugin


def popen(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"dense": fit(Net(), gradients(1.0))}
    # the weights stay, so that each sees the same gradients
    beside = Beside()
    rules = [HOME.AdaScaleLR(), beside]
    still = {
        "dense": fit(Net(lr=0.0), gradients(1.0)),
        "gradients": fit(Net(lr=0.0), gradients(0.01), rules),
        "rising": fit(Net(lr=0.0), gradients(lambda step: 1.0 if step in (0, 8) or step > 15 else 0.01)),
        "momentum": fit(Net(lr=0.0), gradients(1.0, memory=ls.MomentumResidual(0.9))),
        "updates": fit(Net(lr=0.0), sparse(ls.Updates())),
        "default": fit(Net(lr=0.0), "sparse_ddp"),
    }
    out["still"] = still
    out["decompressed"] = {"each": beside.estimate.each / STEPS, "mean": beside.estimate.mean / STEPS}
    for name, exchange in {"updates": ls.Updates(overlap=True), "gradients": ls.Gradients()}.items():
        for optimizer in ("sgd", "adamw"):
            out[f"{name} {optimizer}"] = fit(
                Net(optimizer), sparse(exchange), [HOME.AdaScaleLR(steps=30)], max_steps=-1, max_epochs=2
            )
    out["wrapped"] = fit(Net("wrapped"), "sparse_ddp")
    bad = Net()
    bad.bad = (1, 5)
    out["bad gradients"] = fit(bad, sparse(ls.Gradients()))
    bad = Net()
    bad.bad = (1, 5)
    out["bad updates"] = fit(bad, sparse(ls.Updates()))
    out["scaled"] = fit(Net(), gradients(1.0), plugins=scaler(), accumulate_grad_batches=2)
    out["unscaled"] = fit(Net(), gradients(1.0), precision="bf16-mixed", accumulate_grad_batches=2)
    for name, exchange in {"updates": ls.Updates(), "gradients": ls.Gradients()}.items():
        save = pl.callbacks.ModelCheckpoint(
            folder / name, save_top_k=-1, filename="{epoch}", every_n_epochs=1, save_on_train_epoch_end=True
        )
        epochs: dict[str, Any] = {"limit_train_batches": 8, "max_epochs": 3}
        whole = fit(Net(), sparse(exchange), [HOME.AdaScaleLR(), save], enable_checkpointing=True, **epochs)
        path = str(folder / name / "epoch=0.ckpt")
        out[f"resumed {name}"] = {"whole": whole, "rest": fit(Net(), sparse(exchange), ckpt_path=path, **epochs)}
    with script(6, 14):
        out["guard gradients"] = fit(Net(), sparse(ls.Gradients()))
        out["guard updates"] = fit(Net(), sparse(ls.Updates()))
    try:
        fit(Net(), "ddp")
    except ValueError as error:
        out["ddp"] = str(error)
    out["sharded"] = sharded()
    return out


def sharded() -> dict[str, list[float]]:
    """Gains and the first weights of a loop by hand, with whole optimizer states and with sharded ones."""

    def average(buffer: Tensor) -> Tensor:
        torch.distributed.all_reduce(buffer)
        return buffer.div_(RANKS)

    def train(optimizer: Any, net: nn.Module) -> list[float]:
        wrapped, found = AdaScale(optimizer, world_size=RANKS, average=average), []
        for step in range(4):
            seed = 10 * step + torch.distributed.get_rank()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            wrapped.zero_grad()
            net(x).square().mean().backward()
            wrapped.observe_pass()
            for p in net.parameters():
                average(p.grad)
            wrapped.step()
            found.append(wrapped.gain.value)
        return [*found, *(float(p.sum()) for p in net.parameters())]

    whole, parts = (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2))
    parts.load_state_dict(whole.state_dict())
    for net in (whole, parts):
        for p in net.parameters():
            torch.distributed.broadcast(p.data, 0)
    shards = ZeroRedundancyOptimizer(parts.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return {
        "whole": train(torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9), whole),
        "shards": train(shards, parts),
    }


def spawn(folder: Path) -> dict[str, Any]:
    out = {"spawn": fit(Net(), "sparse_ddp_spawn")}
    for name, strategy in {"auto": "auto", "updates": "sparse_ddp", "gradients": gradients(0.01)}.items():
        options = {"train": data_of_one_rank(), "devices": 1, "use_distributed_sampler": False}
        out[name] = fit(Net(), strategy, accumulate_grad_batches=2, **options)
    return out


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(150, exit=True)
    folder = Path(sys.argv[2])
    results = {"popen": popen, "spawn": spawn}[sys.argv[1]](folder)
    rank = 0 if IS_SPAWN else torch.distributed.get_rank()
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
