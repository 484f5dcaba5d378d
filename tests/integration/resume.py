"""Trains on real ranks, stops, and goes on from a checkpoint; writes what each rank saw to a file.

python resume.py FOLDER RANKS STAGE    Lightning starts the other ranks by running it again.

STAGE is the name of a stage, or "kill SEED", and then "killed SEED".
"""

from __future__ import annotations

import copy
import faulthandler
import os
import random
import signal
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from tests.integration.launch import leave

EPOCHS, BATCHES = 4, 5
SEEDS = 20


class Net(pl.LightningModule):
    """Draws from the generators in every step, as dropout does."""

    def __init__(self, optimizer: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 10)).to(dtype)
        self.name = optimizer

    def training_step(self, batch: list[Tensor]) -> Tensor:
        dtype = self.layers[0].weight.dtype
        return nn.functional.mse_loss(
            self.layers(batch[0].to(dtype)) * (1 + 0.01 * random.random()), batch[1].to(dtype)
        )

    def validation_step(self, batch: list[Tensor]) -> None:
        """Shows the shared weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.003)


class StoppedError(Exception):
    """Raised where training is to end."""


class StopAt(pl.Callback):
    def __init__(self, step: int, kill: bool = False) -> None:
        self.step, self.kill = step, kill

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            if self.kill:
                # every rank of this run, this one included
                os.killpg(0, signal.SIGKILL)
            raise StoppedError


class Owed(pl.Callback):
    """What the ranks owe each other when training begins, in float64."""

    owed: dict[str, dict[str, Tensor]] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        tap = trainer.strategy.tap
        self.begun = weights(module)
        if tap is not None:
            owed = tap.owed(trainer.world_size)
            self.owed = {kind: {n: x.double() for n, x in parts.items()} for kind, parts in owed.items()}


def data(ranks: int) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8 * ranks * BATCHES, 32, generator=generator)
    y = torch.tanh(x @ torch.randn(32, 10, generator=generator))
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def fit(net: Net, strategy: Any, ranks: int, *callbacks: pl.Callback, path: Path | None = None, **options: Any) -> Any:
    # dropout must not be the same on every rank
    torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
    random.seed(1)
    defaults: dict[str, Any] = {"max_epochs": EPOCHS, "logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        callbacks=list(callbacks),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{**defaults, **options},
    )
    trainer.fit(net, data(ranks), data(ranks), ckpt_path=path, weights_only=True)
    return trainer


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in net.state_dict().items()}


STRATEGIES: dict[str, Any] = {
    "updates": lambda kind: ls.SparseDDPStrategy(residual_checkpoint=kind),
    "overlap": lambda kind: ls.SparseDDPStrategy(
        exchange=ls.Updates(overlap=True, outer_momentum=0.5), residual_checkpoint=kind
    ),
    "top-k": lambda kind: ls.SparseDDPStrategy(density=0.05, residual_checkpoint=kind),
    "bf16": lambda kind: ls.SparseDDPStrategy(residual_checkpoint=kind),
    "gradients": lambda kind: ls.SparseDDPStrategy(
        density=0.05, exchange=ls.Gradients(), compressor=ls.SampledTopK(), residual_checkpoint=kind
    ),
    "momentum": lambda kind: ls.SparseDDPStrategy(
        density=0.05, memory=ls.MomentumResidual(0.9), residual_checkpoint=kind
    ),
    "gradients blocks": lambda kind: ls.SparseDDPStrategy(
        exchange=ls.Gradients(), codec=ls.Quantized(2), residual_checkpoint=kind
    ),
}


def make(name: str) -> Net:
    return Net(
        "sgd" if name in ("gradients", "momentum", "gradients blocks") else "adamw", DTYPES.get(name, torch.float32)
    )


DTYPES = {"bf16": torch.bfloat16}


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)


def exact(folder: Path) -> dict[str, Any]:
    """Stop at a step drawn at random, go on from the last file, and compare with never having stopped."""
    out: dict[str, Any] = {}
    for name in STRATEGIES:
        net = make(name)
        fit(net, STRATEGIES[name]("exact"), 2, saver(folder / name))
        out[name] = weights(net)
    for seed in range(SEEDS):
        name, step = drawn(seed)
        here = folder / f"{name} {seed}"
        with pytest.raises(StoppedError):
            fit(make(name), STRATEGIES[name]("exact"), 2, saver(here), StopAt(step))
        torch.distributed.barrier()
        net, path = make(name), here / f"epoch={step // BATCHES - 1}.ckpt"
        fit(net, STRATEGIES[name]("exact"), 2, path=path)
        out[f"{name}, seed {seed}, step {step}"] = weights(net)
    return out


def drawn(seed: int) -> tuple[str, int]:
    """A strategy, and a step behind the first file."""
    return list(STRATEGIES)[seed % len(STRATEGIES)], random.Random(seed).randrange(BATCHES, EPOCHS * BATCHES)


def kill(folder: Path, seed: int) -> None:
    """Train until all ranks are killed at once."""
    name, step = drawn(seed)
    fit(make(name), STRATEGIES[name]("exact"), 2, saver(folder / f"kill {seed}"), StopAt(step, kill=True))


def killed(folder: Path, seed: int) -> dict[str, Any]:
    """Go on from the last file of ranks that were killed."""
    name, step = drawn(seed)
    net = make(name)
    fit(net, STRATEGIES[name]("exact"), 2, path=folder / f"kill {seed}" / f"epoch={step // BATCHES - 1}.ckpt")
    return weights(net)


def save(folder: Path, ranks: int) -> dict[str, Any]:
    """Train two epochs of four; the files and what was owed then."""
    out = {}
    for name in STRATEGIES:
        for kind in ("exact", "mean", "none"):
            here = folder / f"{name} {kind} {ranks}"
            ended = End()
            fit(make(name), STRATEGIES[name](kind), ranks, saver(here), ended, max_epochs=2)
            out[f"{name} {kind}"] = ended.owed
    fit(Net("adamw"), "ddp", ranks, saver(folder / "ddp"), max_epochs=2)
    return out


class End(Owed):
    """What ranks owe each other when the second epoch is saved."""

    def on_train_start(self, *_: Any) -> None:
        """Not yet."""

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_train_start(trainer, module)


def go_on(folder: Path, ranks: int, before: int) -> dict[str, Any]:
    """Go on from what another number of ranks has saved."""
    out = {}
    for name in STRATEGIES:
        for kind in ("exact", "mean", "none"):
            net, owed = make(name), Owed()
            path = folder / f"{name} {kind} {before}" / "epoch=1.ckpt"
            fit(net, STRATEGIES[name](kind), ranks, owed, path=path, max_epochs=3)
            out[f"{name} {kind}"] = {"owed": owed.owed, "begun": owed.begun, "weights": weights(net)}
    return out


def other_strategies(folder: Path, ranks: int) -> dict[str, Any]:
    """Plain ddp goes on from our file, and we from its."""
    net = Net("adamw")
    fit(net, "ddp", ranks, path=folder / f"updates mean {ranks}" / "epoch=1.ckpt", max_epochs=3)
    out = {"ddp": weights(net)}
    net = Net("adamw")
    fit(net, ls.SparseDDPStrategy(), ranks, path=folder / "ddp" / "epoch=1.ckpt", max_epochs=3)
    return out | {"ours": weights(net)}


class Bad(Net):
    """The loss is NaN on one rank in some steps."""

    def __init__(self, optimizer: str, rank: int, steps: Container[int]) -> None:
        super().__init__(optimizer)
        self.bad_rank, self.bad_steps = rank, steps

    def training_step(self, batch: list[Tensor]) -> Tensor:
        is_bad = self.global_rank == self.bad_rank and self.trainer.fit_loop.total_batch_idx in self.bad_steps
        return super().training_step(batch) * (torch.nan if is_bad else 1.0)


def spoiled(folder: Path) -> dict[str, Any]:
    """Files around gradients that are not finite."""
    out: dict[str, Any] = {}
    for name in ("gradients", "momentum"):
        # one rank has refused every step when the file is written
        here = folder / f"refused {name}"
        fit(Bad("sgd", 1, range(BATCHES)), STRATEGIES[name]("mean"), 2, saver(here), max_epochs=1)
        out[name] = torch.load(here / "epoch=0.ckpt", weights_only=True)["sparse_ddp"]["owed"]
    for rank in range(2):
        # behind the last exchange of the run
        strategy = ls.SparseDDPStrategy(exchange=ls.Updates(every=4), on_nonfinite="raise")
        with pytest.raises(FloatingPointError, match="on_nonfinite='skip'"):
            fit(Bad("adamw", rank, [BATCHES - 1]), strategy, 2, saver(folder / f"raised {rank}"), max_epochs=1)
        torch.distributed.barrier()
    out["files"] = [str(path) for path in folder.glob("raised */*")]
    on_exception = OnExceptionCheckpoint(folder, "on_exception")
    with pytest.raises(FloatingPointError):
        fit(Bad("adamw", 0, [3]), ls.SparseDDPStrategy(on_nonfinite="raise"), 2, on_exception, max_epochs=1)
    torch.distributed.barrier()
    out["state"] = torch.load(folder / "on_exception.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    # the exchange of gradients begins anew from what the other one has left
    net = Net("adamw")
    fit(net, ls.SparseDDPStrategy(exchange=ls.Gradients()), 2, path=folder / "on_exception.ckpt", max_epochs=2)
    return out | {"weights": weights(net)}


def refused(folder: Path) -> dict[str, str]:
    """States that are not ours, not whole, or not of this model."""
    messages = {}
    rank = torch.distributed.get_rank()
    for name, kind in (("updates", "mean"), ("updates", "exact"), ("gradients", "mean")):
        good = torch.load(folder / f"{name} {kind} 2" / "epoch=1.ckpt", weights_only=True)
        for fault, break_ in {**FAULTS, **(OF_RANKS if kind == "exact" else {})}.items():
            path = folder / f"{fault}.ckpt"
            if rank == 0:
                bad = {**good, "sparse_ddp": break_(copy.deepcopy(good["sparse_ddp"]))}
                torch.save(bad, path)
            torch.distributed.barrier()
            with pytest.raises(ValueError, match=r"sparse_ddp|Updates") as caught:
                fit(make(name), STRATEGIES[name](kind), 2, path=path, max_epochs=3)
            messages[f"{name} {kind}: {fault}"] = str(caught.value)
            torch.distributed.barrier()
    return messages


def _parts(state: Any) -> Any:
    first = state["ranks"][1]["own"] if "ranks" in state else state["owed"]
    return next(iter(first.values()))


def _shorten(state: Any) -> Any:
    _parts(state)["layers.0.weight"] = torch.zeros(3)
    return state


def _rename(state: Any) -> Any:
    parts = _parts(state)
    parts["elsewhere.weight"] = parts.pop("layers.0.weight")
    return state


def _lose(state: Any) -> Any:
    del _parts(state)["layers.0.weight"]
    return state


def _spoil(state: Any) -> Any:
    _parts(state)["layers.0.weight"].view(-1)[0] = torch.nan
    return state


def _to_integers(state: Any) -> Any:
    parts = _parts(state)
    parts["layers.0.weight"] = parts["layers.0.weight"].long()
    return state


def _of_second(state: Any, key: str, value: Any) -> Any:
    if "ranks" in state:
        state["ranks"][1][key] = value
    return state


def _optimizer(state: Any) -> Any:
    return state["ranks"][1]["optimizers"][0]


def _spoil_moments(state: Any) -> Any:
    _optimizer(state)["state"][0]["exp_avg"].view(-1)[0] = torch.nan
    return state


def _shorten_moments(state: Any) -> Any:
    _optimizer(state)["state"][0]["exp_avg"] = torch.zeros(3)
    return state


FAULTS: dict[str, Any] = {
    "shortened": _shorten,
    "renamed": _rename,
    "of another version": lambda state: {**state, "version": 99},
    "of another exchange": lambda state: {**state, "exchange": "gossip"},
    "truncated": lambda state: {key: state[key] for key in ("version", "kind", "exchange")},
    "without a parameter": _lose,
    "not finite": _spoil,
    "without counters": lambda state: {**state, "shared": {}},
    "foreign": lambda state: "something",
    "of integers": _to_integers,
    "without a layout": lambda state: {**_of_second(state, "layout", None), "layout": None},
    "without exchange": lambda state: {key: x for key, x in state.items() if key != "exchange"},
}
OF_RANKS: dict[str, Any] = {
    "without optimizers": lambda state: _of_second(state, "optimizers", []),
    "without moments": lambda state: _of_second(state, "optimizers", [{**_optimizer(state), "state": {}}]),
    "with NaN in moments": _spoil_moments,
    "with a weight of another shape": _shorten_moments,
}


def run(folder: Path, ranks: int, stage: str) -> None:
    faulthandler.dump_traceback_later(280, exit=True)
    if stage == "two":
        results: dict[str, Any] = {"exact": exact(folder), "save": save(folder, 2)}
        results |= {"others": other_strategies(folder, 2), "refused": refused(folder)}
        results["spoiled"] = spoiled(folder)
    elif stage.startswith("kill"):
        way, seed = stage.split()
        results = {"killed": killed(folder, int(seed))} if way == "killed" else {"kill": kill(folder, int(seed))}
    else:
        before = 2 if ranks == 4 else 4
        results = {"go on": go_on(folder, ranks, before)}
        if ranks == 4:
            results["save"] = save(folder, 4)
    leave(folder / f"{stage}{torch.distributed.get_rank()}.pt", results)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
