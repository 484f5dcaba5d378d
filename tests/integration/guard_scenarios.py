"""Trains on real ranks that change over between the exchange and DDP, and writes what each rank saw to a file.

Run by `test_change_over.py` as a script: Lightning starts the second rank by running it again.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse import connection, guard
from lightning_sparse.checksum import checksum
from lightning_sparse.pace import Pace
from tests.integration.launch import leave
from tests.integration.scenarios import Ledger, Net, Tuned, Unfreeze, data, fit, weights

THERE, BACK = 6, 14


@contextmanager
def script(*steps: int) -> Iterator[None]:
    """The guard changes over after these steps, whatever the time."""

    def lap(self: guard.Guard, seconds: float, busy: float) -> bool:
        self._count += 1
        self.is_dense ^= self._count in steps
        return self._count in steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard.Guard, "lap", lap)
        yield


class Look(pl.Callback):
    """What the module is wrapped in and the checksum of its weights after every step."""

    def __init__(self) -> None:
        self.wrapped: list[bool] = []
        self.sums: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.wrapped.append(isinstance(trainer.strategy.model, DistributedDataParallel))
        self.sums.append(checksum(module))


class Mass(pl.Callback):
    """The weights right before DDP takes over and right after, with what averaging had rounded away, in float64."""

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        change = trainer.strategy._change_over

        def watched(decision: guard.Guard) -> None:
            lost = trainer.strategy.tap._groups.values().__iter__().__next__().anchor.state_dict()["lost"]
            # a part of the mean, so each of two ranks' progress has twice of its own in it
            self.before = {n: p.detach().double().flatten() for n, p in module.named_parameters()}
            self.before = {n: x + 2 * lost[n].double() if n in lost else x for n, x in self.before.items()}
            self.scales, self.squares = trainer.strategy.tap.lr_scales(), _second_moments(trainer, module)
            change(decision)
            self.squares_after = _second_moments(trainer, module)
            self.after = {n: p.detach().double().flatten() for n, p in module.named_parameters()}

        trainer.strategy._change_over = watched


def _second_moments(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    states = trainer.optimizers[0].state
    return {name: states[p]["exp_avg_sq"].clone() for name, p in module.named_parameters()}


def plain() -> dict[str, Any]:
    """SGD at density 1, there and back, is SGD with DDP."""
    out = {}
    for name, strategy in {
        "ddp": "ddp",
        "updates": ls.SparseDDPStrategy(density=1.0, exchange=ls.Updates(anchor_step=1.0)),
    }.items():
        net = Net("plain")
        with script(THERE, BACK):
            fit(net, strategy)
        out[name] = {"weights": weights(net)}
    return out


def adam() -> dict[str, Any]:
    net, look, mass = Net("adamw", norm=True), Look(), Mass()
    with script(THERE):
        trainer = fit(net, ls.SparseDDPStrategy(), callbacks=[look, mass], val=data(seed=4, samples=32))
    states = trainer.optimizers[0].state.values()
    moments = [x.clone() for state in states for x in state.values() if isinstance(x, Tensor)]
    return {
        "weights": weights(net),
        "seen": net.seen,
        "sums": look.sums,
        "wrapped": look.wrapped,
        "moments": moments,
        "before": mass.before,
        "after": mass.after,
        "scales": mass.scales,
        "squares": mass.squares,
        "squares_after": mass.squares_after,
        "summary": trainer.strategy.summary(),
    }


def there_and_back() -> dict[str, Any]:
    net, look = Net("adamw"), Look()
    with script(THERE, BACK):
        fit(net, ls.SparseDDPStrategy(exchange=ls.Updates(overlap=True, outer_momentum=0.5)), callbacks=[look])
    return {"weights": weights(net), "sums": look.sums, "wrapped": look.wrapped}


class Mixed(Net):
    """Weights of half precision, and a branch that takes part in every other step only."""

    def __init__(self, turn: int) -> None:
        super().__init__("adamw")
        self.branch, self.turn = nn.Linear(32, 10), turn
        self.to(torch.bfloat16)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = (part.to(torch.bfloat16) for part in batch)
        out = self.head(self.layers(x))
        return nn.functional.mse_loss(out if self.global_step % 2 == self.turn else out + self.branch(x), y)


def mixed() -> dict[str, Any]:
    out = {}
    for turn in range(2):
        net = Mixed(turn)
        with script(THERE, BACK):
            fit(net, ls.SparseDDPStrategy())
        out[str(turn)] = {"weights": weights(net)}
    return out


class Poisoned(Net):
    """The second rank's gradient is NaN in one step."""

    def __init__(self, step: int) -> None:
        super().__init__("adamw")
        self.step = step

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        return loss * torch.nan if (self.global_step, self.global_rank) == (self.step, 1) else loss


def poisoned() -> dict[str, Any]:
    """While DDP is in charge: skipped by every rank, or raised on every rank."""
    out: dict[str, Any] = {}
    for way in ("skip", "raise"):
        net, error = Poisoned(THERE + 3), ""
        with script(THERE):
            try:
                trainer = fit(net, ls.SparseDDPStrategy(on_nonfinite=way))
                skipped = trainer.strategy.summary()["skipped"]
            except FloatingPointError as raised:
                error = str(raised)
        out[way] = {"weights": weights(net), "error": error, "skipped": skipped}
    return out


class Nested(Net):
    """Keeps tensors inside a list, as Shampoo does."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        class Listed(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                for group in self.param_groups:
                    for p in group["params"]:
                        self.state[p]["list"] = [p.detach().clone()]
                return result

        return Listed(self.parameters(), lr=0.05)


def refused() -> dict[str, Any]:
    """What DDP cannot take over stays with the exchange."""
    net, look = Nested(), Look()
    with script(THERE):
        trainer = fit(net, ls.SparseDDPStrategy(), callbacks=[look])
    return {"weights": weights(net), "wrapped": look.wrapped, "guard": trainer.strategy.summary()["guard"]}


def found() -> dict[str, Any]:
    """The learning rate finder's training changes over; the real one begins anew, with the exchange."""
    net, look = Net("adamw"), Look()
    with script(THERE):
        fit(net, ls.SparseDDPStrategy(), callbacks=[LearningRateFinder(num_training_steps=10), look])
    return {"weights": weights(net), "wrapped": look.wrapped}


class OneSided(Net):
    """A branch that the second rank does not use right behind the change."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.branch = nn.Linear(32, 10)

    def loss(self, batch: list[Tensor]) -> Tensor:
        out = self.head(self.layers(batch[0]))
        idle = self.global_step == THERE and self.global_rank == 1
        return nn.functional.mse_loss(out if idle else out + self.branch(batch[0]), batch[1])


def one_sided() -> dict[str, Any]:
    net = OneSided()
    strategy = ls.SparseDDPStrategy(density=0.05, exchange=ls.Gradients(), find_unused_parameters=True)
    with script(THERE):
        fit(net, strategy)
    return {"weights": weights(net)}


def unfrozen() -> dict[str, Any]:
    """Layers join while DDP, which does not know them, is in charge."""
    net, look = Tuned("adamw"), Look()
    with script(THERE):
        fit(net, ls.SparseDDPStrategy(), callbacks=[Unfreeze(), look], max_epochs=2)
    return {"weights": weights(net), "sums": look.sums}


def averaged() -> dict[str, Any]:
    """A callback puts other weights into the module at the very end, behind DDP's back."""
    net = Net("adamw")
    averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=1)
    with script(30):
        fit(net, ls.SparseDDPStrategy(), callbacks=[averaging], max_epochs=3)
    return {"weights": weights(net)}


def gradients() -> dict[str, Any]:
    """What was kept leaves with the first dense exchange."""
    out = {}
    memories = {"residual": ls.Residual(), "momentum": ls.MomentumResidual(0.9), "blocks": ls.Residual()}
    for name, memory in memories.items():
        net, whole, ledger = Net("plain"), Net("plain"), Ledger()
        codec = ls.Quantized(2) if name == "blocks" else None
        options = {"density": 0.05, "memory": memory, "bucket_cap_mb": 0.005, "codec": codec}
        with script(THERE):
            fit(net, ls.SparseDDPStrategy(**options), callbacks=[ledger], max_steps=THERE + 1)
        with script(THERE, BACK):
            fit(whole, ls.SparseDDPStrategy(**options))
        out[name] = {**ledger.terms(), "weights": weights(whole)}
    return out


class Begun(pl.Callback):
    """Second moments, and factors on steps, when training begins."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.squares, self.scales = _second_moments(trainer, module), trainer.strategy.tap.lr_scales()


def resumed(folder: Path) -> dict[str, Any]:
    """A file that was written while DDP was in charge, for both kinds of state."""
    out = {}
    for kind in ("mean", "exact"):
        save = ModelCheckpoint(folder / kind, every_n_train_steps=10, save_top_k=-1, filename="{step}")
        with script(THERE):
            net = Net("adamw")
            fit(net, ls.SparseDDPStrategy(residual_checkpoint=kind), callbacks=[save], enable_checkpointing=True)
        with script():
            net, begun = Net("adamw"), Begun()
            path = folder / kind / "step=10.ckpt"
            fit(net, ls.SparseDDPStrategy(residual_checkpoint=kind), ckpt_path=path, callbacks=[begun])
        states = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        saved = dict(zip(begun.squares, (state["exp_avg_sq"] for state in states.values()), strict=True))
        out[kind] = {"weights": weights(net), "saved": saved, "squares": begun.squares, "scales": begun.scales}
    return out


def measured() -> dict[str, Any]:
    """The real guard, in a hurry: what it measures and decides is the same on every rank."""
    out = {}
    for name, exchange in {"updates": ls.Updates(), "gradients": ls.Gradients()}.items():
        net = Net("adamw" if name == "updates" else "plain")
        with pytest.MonkeyPatch.context() as patch:
            for constant, value in {"_WARMUP": 1, "_WINDOW": 3, "_TRIAL_WARMUP": 1, "_TRIAL": 3, "_RECHECK": 4}.items():
                patch.setattr(guard, constant, value)
            trainer = fit(net, ls.SparseDDPStrategy(exchange=exchange))
        out[name] = {"weights": weights(net), "guard": trainer.strategy.summary()["guard"]}
    return out


def ladder() -> dict[str, Any]:
    """density="auto" on a link that has room, and on one that has none."""
    out = {}
    for name, link, busy in (("room", 1e-9, 1e-4), ("none", 1e3, 0.5)):
        for exchange in (ls.Updates(), ls.Gradients()):
            net = Net("adamw" if exchange.name == "updates" else "plain")
            with pytest.MonkeyPatch.context() as patch:
                for constant, value in {"_WARMUP": 1, "_WINDOW": 3, "_RECHECK": 100}.items():
                    patch.setattr(guard, constant, value)
                patch.setattr(connection, "all_reduce_seconds", lambda *_, link=link: link)
                # work on this machine is not what is asked here
                patch.setattr(Pace, "lap", lambda self, busy=busy: self.guard.lap(1.0, busy))
                look = Rungs()
                blocks = ls.WeightBlocks() if exchange.name == "gradients" else None
                strategy = ls.SparseDDPStrategy(density="auto", exchange=exchange, compressor=blocks, guard=False)
                fit(net, strategy, callbacks=[look])
            out[f"{name} {exchange.name}"] = {"weights": weights(net), "rungs": look.rungs}
    return out


class Rungs(pl.Callback):
    """Density and codec behind every step."""

    def __init__(self) -> None:
        self.rungs: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        reducer = trainer.strategy.reducer
        self.rungs.append(f"{reducer.density(0)} {reducer._codec._codec}")


SCENARIOS = (
    plain,
    adam,
    there_and_back,
    mixed,
    unfrozen,
    averaged,
    poisoned,
    refused,
    found,
    one_sided,
    gradients,
    measured,
    ladder,
)


def run(folder: Path) -> None:
    results: dict[str, Any] = {scenario.__name__: scenario() for scenario in SCENARIOS}
    results["resumed"] = resumed(folder / "checkpoints")
    leave(folder / f"rank{torch.distributed.get_rank()}.pt", results)


if __name__ == "__main__":
    # a rank that is stuck says where, and ends
    faulthandler.dump_traceback_later(120, exit=True)
    run(Path(sys.argv[1]))
