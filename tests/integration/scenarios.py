"""Trains small models on real ranks, one scenario after the other, and writes what each rank saw to a file.

Run by `test_scenarios.py` as a script: Lightning starts the second rank by running it again.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning, LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from lightning_sparse.checksum import checksum
from tests.integration.launch import leave

RANKS = 2
STEPS = 20


def data(seed: int = 3, samples: int = 8 * RANKS * STEPS) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 32, generator=generator)
    y = torch.tanh(x @ torch.randn(32, 10, generator=generator))
    return DataLoader(TensorDataset(x, y), batch_size=8)


class Net(pl.LightningModule):
    """Two hidden layers, several buckets' worth of parameters if buckets are small."""

    def __init__(self, optimizer: str = "sgd", norm: bool = False, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64) if norm else nn.Identity(), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
        )
        self.head = nn.Linear(64, 10)
        self.optimizer, self.lr = optimizer, lr
        self.seen: list[str] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.head(self.layers(batch[0])), batch[1])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.seen.append(checksum(self))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.optimizer == "plain":
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def fit(module: pl.LightningModule, strategy: Any, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    train = options.pop("train", None) or data()
    val, resume = options.pop("val", None), options.pop("ckpt_path", None)
    trainer = pl.Trainer(strategy=strategy, **{**defaults, **options})
    trainer.fit(module, train, val, ckpt_path=resume)
    return trainer


class Ledger(pl.Callback):
    """Writes down, in float64, what came in, what was applied and what is kept: the telescope law's three terms."""

    def __init__(self) -> None:
        self.came: dict[str, Tensor] = {}
        self.applied: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.start: dict[str, Tensor] = {}
        self.hooks = Counter[int]()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.module, self.tap = module, trainer.strategy.tap
        self.start = {name: p.detach().double() for name, p in module.named_parameters()}
        if self.tap.name == "gradients":
            self._watch_gradients(trainer)
        else:
            for optimizer in trainer.strategy.optimizers:
                optimizer.register_step_pre_hook(lambda *_: self._before())
                optimizer.register_step_post_hook(lambda *_: self._after())

    def _watch_gradients(self, trainer: pl.Trainer) -> None:
        submit = trainer.strategy.reducer.submit

        def watched(job: Any, apply: Callable[..., Any]) -> Any:
            self.hooks[job.step] += 1
            names, tensors = [*job.names, *job.dense_names], [*job.inputs, *job.dense_inputs]
            for name, x in zip(names, tensors, strict=True):
                _add(self.came, name, x)
            return submit(job, apply)

        trainer.strategy.reducer.submit = watched

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        for name, p in module.named_parameters():
            _add(self.applied, name, torch.zeros_like(p) if p.grad is None else p.grad)

    def _before(self) -> None:
        self.previous = {name: p.detach().double() for name, p in self.module.named_parameters()}
        self.scales = self.tap.lr_scales()

    def _after(self) -> None:
        for name, p in self.module.named_parameters():
            # steps are stretched behind this hook, unless they were made with longer rates
            (group,) = [group for group in self.tap._groups.values() if name in group.parameters]
            factor = self.scales[name] / group._rates.applied.get(name, 1.0)
            _add(self.came, name, factor * (p.detach().double() - self.previous[name]))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.tap.name == "gradients":
            self.kept = {name: x.double() for name, x in self.tap._memory.state_dict()["residual"].items()}

    def terms(self) -> dict[str, dict[str, Tensor]]:
        return {"came": self.came, "applied": self.applied, "kept": self.kept, "start": self.start}


def _add(sums: dict[str, Tensor], name: str, x: Tensor) -> None:
    sums[name] = sums.get(name, 0) + x.detach().double().flatten()


class KeepUnshared(pl.Callback):
    """Takes down the rank's own unshared progress just before the end of training hides it."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        tap = trainer.strategy.tap
        for group in tap._groups.values():
            tap._merge(group)
        anchors = {name: x for group in tap._groups.values() for name, x in group.anchor.flat.items()}
        lost = {name: x for group in tap._groups.values() for name, x in group.anchor.state_dict()["lost"].items()}
        self.unshared = {n: p.detach().flatten().double() - anchors[n] for n, p in module.named_parameters()}
        for name, x in lost.items():
            # rounded off the mean, so every rank's progress has a part in it
            self.unshared[name] += RANKS * x.double()


def density_one() -> dict[str, Any]:
    """Gradients at density 1 against stock DDP, and updates with plain SGD."""
    out = {}
    rows = {
        "ddp": ("sgd", "ddp", {}),
        "gradients": ("sgd", ls.SparseDDPStrategy(density=1.0, exchange=ls.Gradients()), {}),
        "ddp plain": ("plain", "ddp", {}),
        "updates": ("plain", ls.SparseDDPStrategy(density=1.0, exchange=ls.Updates(overlap=False)), {}),
        "momentum": ("plain", ls.SparseDDPStrategy(density=1.0, memory=ls.MomentumResidual(0.9)), {}),
    }
    for name, (optimizer, strategy, options) in rows.items():
        net = Net(optimizer)
        fit(net, strategy, **options)
        out[name] = weights(net)
    return out


def gradients_telescope() -> dict[str, Any]:
    """Sparse gradients through several buckets and their rebuild, with accumulation."""
    out = {}
    for name, compressor in {
        "layer": ls.TopK(scope="layer"),
        "bucket": ls.SampledTopK(scope="bucket"),
        "model": None,
    }.items():
        net, ledger = Net("sgd"), Ledger()
        strategy = ls.SparseDDPStrategy(
            density=0.05, exchange=ls.Gradients(), compressor=compressor, bucket_cap_mb=0.005
        )
        trainer = fit(net, strategy, callbacks=[ledger], accumulate_grad_batches=2)
        out[name] = {
            **ledger.terms(),
            "hooks": dict(ledger.hooks),
            "weights": weights(net),
            "summary": trainer.strategy.summary(),
        }
    return out


def updates_telescope() -> dict[str, Any]:
    out = {}
    rows = {
        "overlap": (ls.Updates(), ls.TopK(), RANKS**0.5),
        "serial": (ls.Updates(overlap=False), ls.TopK(), RANKS**0.5),
        "every": (ls.Updates(every=3), ls.TopK(), RANKS**0.5),
        "eta": (ls.Updates(anchor_step=lambda step: 1.0), ls.TopK(), 1.0),
        "blocks": (ls.Updates(), None, 1.0),
        "blocks serial": (ls.Updates(overlap=False, anchor_step=1.2, dense_below=64), None, 1.2),
    }
    for name, (exchange, compressor, eta) in rows.items():
        net, ledger, unshared = Net("adamw"), Ledger(), KeepUnshared()
        strategy = ls.SparseDDPStrategy(density=0.05 if compressor else None, exchange=exchange, compressor=compressor)
        trainer = fit(net, strategy, callbacks=[ledger, unshared], gradient_clip_val=1.0)
        out[name] = {
            **ledger.terms(),
            "unshared": unshared.unshared,
            "weights": weights(net),
            "summary": trainer.strategy.summary(),
            "eta": eta,
        }
    return out


class Snapshots(pl.Callback):
    """Own weights before validation and after it, and the anchor at the steps that are saved."""

    def __init__(self) -> None:
        self.anchors: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if not hasattr(self, "during"):
            self.before = checksum(module)
        if trainer.global_step % 7 == 0:
            for group in trainer.strategy.tap._groups.values():
                trainer.strategy.tap._merge(group)
                self.anchors[trainer.global_step] = {name: x.clone() for name, x in group.anchor.flat.items()}

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.during = getattr(self, "during", None) or checksum(module)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if hasattr(self, "during") and not hasattr(self, "after"):
            self.after = checksum(module)


def anchor_is_shown(folder: Path) -> dict[str, Any]:
    """Validation and checkpoints see the anchor; training goes on from the rank's own weights."""
    net, snapshots = Net("adamw", norm=True), Snapshots()
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=7, save_top_k=-1, filename="{step}")
    strategy = ls.SparseDDPStrategy(density=0.02)
    trainer = fit(
        net,
        strategy,
        callbacks=[snapshots, checkpoint],
        enable_checkpointing=True,
        val=data(seed=4, samples=32),
        val_check_interval=9,
        num_sanity_val_steps=0,
    )
    ended = weights(net)
    after = folder / "after" / "fit.ckpt"
    trainer.save_checkpoint(after)
    trainer.validate(net, data(seed=4, samples=32), verbose=False)
    return {
        "before": snapshots.before,
        "during": snapshots.during,
        "after": snapshots.after,
        "seen": net.seen,
        "weights": ended,
        "anchors": snapshots.anchors,
        "files": sorted(str(path.name) for path in folder.glob("*.ckpt")),
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "after_fit": torch.load(after, weights_only=True)["sparse_ddp"]["shared"],
        "last": torch.load(folder / "step=14.ckpt", weights_only=True)["sparse_ddp"]["shared"],
    }


class TwoOptimizers(Net):
    """Manual optimization with accumulation by hand; the second optimizer steps every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        body = self.optimizers()[0]
        # stepped behind Lightning's back
        head = self.optimizers(use_pl_optimizer=False)[1]
        self.toggle_optimizer(body)
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(body, 1.0, "norm")
            body.step()
            body.zero_grad()
        self.untoggle_optimizer(body)
        if batch_idx % 3 == 2:
            self.toggle_optimizer(head)
            head.zero_grad()
            self.manual_backward(self.loss(batch))
            head.step()
            head.zero_grad()
            self.untoggle_optimizer(head)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        body = torch.optim.AdamW(self.layers.parameters(), lr=0.003)
        return [body, torch.optim.SGD(self.head.parameters(), lr=0.05)]


def manual() -> dict[str, Any]:
    out = {}
    for name, exchange in {"updates": ls.Updates(), "gradients": ls.Gradients()}.items():
        net = TwoOptimizers()
        start = weights(net)
        strategy = ls.SparseDDPStrategy(
            density=0.05, exchange=exchange, compressor=ls.TopK(), find_unused_parameters=True
        )
        fit(net, strategy)
        out[name] = {"start": start, "weights": weights(net)}
    return out


class Sometimes(Net):
    """A branch that takes part on every other step only, on both ranks."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.branch = nn.Linear(64, 64)

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.layers(batch[0])
        if self.global_step % 2 == 0:
            hidden = hidden + self.branch(hidden)
        return nn.functional.mse_loss(self.head(hidden), batch[1])


def unused() -> dict[str, Any]:
    net, ledger = Sometimes(), Ledger()
    fit(
        net,
        ls.SparseDDPStrategy(density=0.05, exchange=ls.Gradients(), find_unused_parameters=True),
        callbacks=[ledger],
    )
    return {**ledger.terms(), "weights": weights(net)}


class Rows(Net):
    def __init__(self) -> None:
        super().__init__("plain")
        self.table = nn.Embedding(100, 32, sparse=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        rows = (batch[0][:, 0].abs() * 25).long().clamp(max=99)
        return nn.functional.mse_loss(self.head(self.layers(self.table(rows))), batch[1])


def row_sparse() -> dict[str, Any]:
    out = {}
    for name, strategy in {"ddp": "ddp", "dense": 1.0, "sparse": 0.05}.items():
        net = Rows()
        fit(
            net,
            strategy if isinstance(strategy, str) else ls.SparseDDPStrategy(density=strategy, exchange=ls.Gradients()),
        )
        out[name] = weights(net)
    return out


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.layers)

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers, optimizer)


class Tuned(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.003)


def finetuning() -> dict[str, Any]:
    net = Tuned("adamw")
    start = weights(net)
    fit(net, ls.SparseDDPStrategy(density=0.05), callbacks=[Unfreeze()], max_epochs=2)
    return {"start": start, "weights": weights(net)}


def again() -> dict[str, Any]:
    """Two fits in a row, bf16 autocast, channels-last weights, and the other tree's Trainer by name."""
    net = Net("adamw")
    for _ in range(2):
        trainer = fit(net, "sparse_ddp", precision="bf16-mixed")
    out: dict[str, Any] = {"weights": weights(net), "summary": trainer.strategy.summary()}

    import lightning.pytorch as lp

    class Other(lp.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            net = nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3), nn.Flatten(), nn.Linear(128, 10))
            self.net = net.to(memory_format=torch.channels_last)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0].view(-1, 1, 8, 4).repeat(1, 1, 1, 2)), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.003)

    other = Other()
    trainer = lp.Trainer(
        strategy="sparse_ddp",
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(other, data())
    out["other tree"] = {"weights": weights(other), "summary": trainer.strategy.summary()}
    return out


class Student(Net):
    """A teacher that no optimizer steps follows the student's weights."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.teacher = nn.Linear(64, 10).requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.layers.parameters(), *self.head.parameters()], lr=0.003)

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)


def outside() -> dict[str, Any]:
    net = Student()
    start = weights(net)
    fit(net, ls.SparseDDPStrategy(density=0.05))
    return {"start": start, "weights": weights(net)}


def averaged() -> dict[str, Any]:
    """A callback that averages weights and puts them into the module at the very end."""
    net = Net("adamw")
    averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=1)
    # long enough for the guard, which `guard_scenarios.py` looks at
    fit(net, ls.SparseDDPStrategy(density=0.05, guard=False), callbacks=[averaging], max_epochs=3)
    return {"weights": weights(net)}


def scaled() -> dict[str, Any]:
    """A loss scaler's factor must not show: neither in the weights nor in what is kept."""
    out = {}
    for scale in (1.0, 4096.0):
        net, ledger = Net("sgd"), Ledger()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7)
        plugin = pl.plugins.MixedPrecision("bf16-mixed", "cpu")
        plugin.scaler = scaler
        strategy = ls.SparseDDPStrategy(density=0.05, exchange=ls.Gradients())
        fit(net, strategy, callbacks=[ledger], plugins=[plugin])
        out[f"from {scale:.0f}"] = {"weights": weights(net), "kept": ledger.kept, "scale": scaler.get_scale()}
    return out


def found() -> dict[str, Any]:
    """The learning rate finder trains and puts the weights back: nothing of that may be left."""
    out = {}
    for name, exchange in {"updates": ls.Updates(), "gradients": ls.Gradients()}.items():
        for way in ("plain", "found"):
            net = Net("adamw" if name == "updates" else "sgd")
            finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None, update_attr=False)
            callbacks = [finder] if way == "found" else []
            fit(net, ls.SparseDDPStrategy(density=0.05, exchange=exchange), callbacks=callbacks)
            out[f"{name} {way}"] = {"weights": weights(net)}
    return out


class Fails(Net):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.global_step == 10:
            raise RuntimeError("the user's own error")
        return super().training_step(batch)


class Poisoned(Net):
    """NaN on the second rank only."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        return loss * torch.nan if self.global_step == 10 and self.global_rank == 1 else loss


class Watch(pl.Callback):
    """Weights and what is kept back, around the poisoned step."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def look(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        (optimizer,) = trainer.strategy.optimizers
        moments = [x.clone() for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        owed = trainer.strategy.tap.owed(RANKS)
        kept = {f"{kind} {name}": x.clone() for kind, parts in owed.items() for name, x in parts.items()}
        return {"weights": weights(module), "kept": kept, "moments": moments}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 10:
            self.before = self.look(trainer, module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 11:
            self.after = self.look(trainer, module)


def skipped() -> dict[str, Any]:
    """NaN on one rank: training goes on."""
    out = {}
    rows = {
        "updates": ("adamw", ls.SparseDDPStrategy()),
        "gradients": ("sgd", ls.SparseDDPStrategy(density=0.05, exchange=ls.Gradients())),
        "blocks": ("sgd", ls.SparseDDPStrategy(exchange=ls.Gradients(), codec=ls.Quantized(2))),
        "momentum": ("plain", ls.SparseDDPStrategy(density=0.05, memory=ls.MomentumResidual(0.9))),
        "dense": ("sgd", ls.SparseDDPStrategy(density=1.0, exchange=ls.Gradients())),
    }
    for name, (optimizer, strategy) in rows.items():
        net, watch = Poisoned(optimizer), Watch()
        monitor = ls.DensityMonitor(every=1)
        trainer = fit(net, strategy, callbacks=[watch, monitor], gradient_clip_val=1.0)
        summary = trainer.strategy.summary()
        out[name] = {"weights": weights(net), "seen": (watch.before, watch.after), "skipped": summary["skipped"]}
        out[name]["logged"] = float(trainer.callback_metrics.get("sparse/skipped", 0))
    return out


class PoisonedTwice(Net):
    """NaN on the second rank in one layer, in one backward pass of which two optimizers step."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        poison = torch.nan if batch_idx == 3 and self.global_rank == 1 else 1.0
        if batch_idx == 3:
            self.kept = {name: x.double() for name, x in self.trainer.strategy.tap.owed(RANKS)["residual"].items()}
            owned = dict(self.layers.named_parameters(prefix="layers"))
            found = torch.autograd.grad(self.loss(batch), list(owned.values()))
            self.gradients = {name: x.flatten().double() for name, x in zip(owned, found, strict=True)}
            handle = self.head.weight.register_hook(lambda gradient: gradient * poison)
        self.manual_backward(self.loss(batch))
        if batch_idx == 3:
            handle.remove()
        for optimizer in self.optimizers():
            optimizer.step()
        if batch_idx == 3:
            self.left = {name: x.double() for name, x in self.trainer.strategy.tap.owed(RANKS)["residual"].items()}

    def configure_optimizers(self) -> Any:
        parts = self.layers.parameters(), self.head.parameters()
        return [torch.optim.SGD(part, lr=self.lr) for part in parts]


def poisoned_twice() -> dict[str, Any]:
    """No optimizer steps, and nothing that other buckets have sent is lost."""
    net = PoisonedTwice()
    strategy = ls.SparseDDPStrategy(
        density=0.05, exchange=ls.Gradients(), compressor=ls.TopK("bucket"), bucket_cap_mb=0.002
    )
    trainer = fit(net, strategy)
    lost = {
        name: float((net.kept[name] + net.gradients.get(name, 0.0) - net.left[name]).abs().max()) for name in net.kept
    }
    return {"weights": weights(net), "skipped": trainer.strategy.summary()["skipped"], "lost": lost}


class Drifting(Net):
    """One rank changes a weight behind everybody's back, or trains with a batch more."""

    def __init__(self, way: str) -> None:
        super().__init__("sgd")
        self.way = way

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank != 1 or self.global_step != 12:
            return
        with torch.no_grad():
            if self.way == "weight":
                self.head.weight[0, 0] += 1e-3
        if self.way == "exchange":
            self.trainer.strategy.reducer.submit_mean(torch.zeros(5))


def checked() -> dict[str, Any]:
    """With debug=True ranks that part ways are told so; ranks that do not train as without."""
    out: dict[str, Any] = {}
    for debug in (False, True):
        net = Net("adamw")
        fit(net, ls.SparseDDPStrategy(debug=debug))
        out[f"debug {debug}"] = {"weights": weights(net)}
    messages = {}
    for way, exchange in (("weight", ls.Gradients()), ("exchange", ls.Gradients()), ("exchange", ls.Updates())):
        with pytest.raises(RuntimeError, match="sparse_ddp: expected") as caught:
            fit(
                Drifting(way),
                ls.SparseDDPStrategy(exchange=exchange, debug=True),
                train=data(samples=8 * RANKS * 101),
            )
        messages[f"{way} {exchange.name}"] = str(caught.value)
    return out | {"messages": messages}


def stopped() -> dict[str, Any]:
    """Errors of the exchange end fit on every rank, in their own words."""
    out = {}
    messages = {"updates": "expected finite weights on every rank", "gradients": "expected finite gradients on every"}
    for name, exchange in {"updates": ls.Updates(), "gradients": ls.Gradients()}.items():
        net = Poisoned("adamw")
        with pytest.raises(FloatingPointError, match=messages[name]):
            fit(net, ls.SparseDDPStrategy(density=0.05, exchange=exchange, on_nonfinite="raise"))
        out[f"nan {name}"] = {"weights": weights(net)}
    net = Poisoned("adamw")
    # clipping hides what was not finite
    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    with pytest.raises(FloatingPointError, match=messages["updates"]):
        fit(net, ls.SparseDDPStrategy(on_nonfinite="raise"), **clip)
    out["nan and clipping"] = {"weights": weights(net)}
    for name, exchange in {"updates": ls.Updates(), "gradients": ls.Gradients()}.items():
        net = Net("adamw")
        density = ls.piecewise({0: 0.05, 5: 7.0})
        with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 7.0 from the schedule at step 5"):
            fit(net, ls.SparseDDPStrategy(density=density, exchange=exchange))
        out[name] = {"weights": weights(net)}
    return out


def disagreeing() -> dict[str, Any]:
    """Ranks that were configured differently are told so before any of them waits for another."""
    rank = torch.distributed.get_rank()
    pairs = {
        "density": [ls.SparseDDPStrategy(density=0.05), ls.SparseDDPStrategy(density=0.2)],
        "exchange": [ls.SparseDDPStrategy(exchange=x) for x in (ls.Updates(), ls.Gradients())],
    }
    messages = {}
    for name, strategies in pairs.items():
        with pytest.raises(ValueError, match="expected the same options and parameters on every rank") as caught:
            fit(Net("adamw"), strategies[rank])
        messages[name] = str(caught.value)
    return {"messages": messages}


def interrupted() -> dict[str, Any]:
    net = Fails("adamw")
    start = weights(net)
    with pytest.raises(RuntimeError, match="the user's own error"):
        fit(net, ls.SparseDDPStrategy(density=0.05))
    return {"start": start, "weights": weights(net), "threads": [t.name for t in threading.enumerate()]}


SCENARIOS: tuple[Callable[[], dict[str, Any]], ...] = (
    density_one,
    gradients_telescope,
    updates_telescope,
    manual,
    unused,
    row_sparse,
    finetuning,
    again,
    outside,
    averaged,
    scaled,
    found,
    skipped,
    poisoned_twice,
    checked,
    stopped,
    disagreeing,
    interrupted,
)


def run(folder: Path) -> None:
    results: dict[str, Any] = {scenario.__name__: scenario() for scenario in SCENARIOS}
    results["anchor_is_shown"] = anchor_is_shown(folder / "checkpoints")
    leave(folder / f"rank{torch.distributed.get_rank()}.pt", results)


if __name__ == "__main__":
    # a rank that is stuck says where, and ends
    faulthandler.dump_traceback_later(150, exit=True)
    run(Path(sys.argv[1]))
