"""LargeBatchLR on one rank: factors, schedulers, groups, resuming. Several ranks are in `tests/integration`."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sparse.callbacks import LargeBatchLR
from lightning_sparse.callbacks.ramp import Ramp
from lightning_sparse.callbacks.scaled_steps import ScaledSteps

BATCH, BATCHES = 4, 12
TREES = ["pytorch_lightning", "lightning"]


# from here on torch calls hooks for the parent's step, too
SGD([nn.Parameter(torch.ones(1))], lr=0.1)


class Recording(SGD):
    """Keeps the learning rates that each step is made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append([float(group["lr"]) for group in self.param_groups])
        return super().step(closure)


def data(batches: int = BATCHES, batch: int = BATCH) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch * batches, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch)


def net(tree: Any = pl, schedule: Any = None, **scheduler: Any) -> Any:
    """A linear layer with two groups of parameters, whose rates are 0.1 and 0.02."""

    class Net(tree.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            nn.init.constant_(self.layer.weight, 0.1)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 0.02}]
            self.optimizer = Recording(groups, lr=0.1, momentum=0.9)
            if schedule is None:
                return self.optimizer
            return [self.optimizer], [{"scheduler": schedule(self.optimizer), "interval": "step", **scheduler}]

    return Net()


def fit(module: Any, *callbacks: Any, tree: Any = pl, path: Any = None, loader: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(x, ModelCheckpoint) for x in callbacks),
    }
    trainer = tree.Trainer(callbacks=list(callbacks), **defaults | options)
    trainer.fit(module, loader if loader is not None else data(), ckpt_path=path, weights_only=True)
    return trainer


def rates(module: Any) -> list[float]:
    return [first for first, _ in module.optimizer.rates]


class TestRamp:
    def test_a_line_to_the_target(self) -> None:
        ramp = Ramp(5)
        ramp.aim(11.0)
        factors = []
        for _ in range(7):
            factors.append(ramp.factor)
            ramp.advance(1)
        assert factors == pytest.approx([1, 3, 5, 7, 9, 11, 11])

    def test_a_new_target_starts_where_it_is(self) -> None:
        ramp = Ramp(2)
        ramp.aim(5.0)
        ramp.advance(1)
        ramp.aim(5.0)
        assert ramp.factor == 3
        ramp.aim(2.0)
        assert ramp.factor == 3
        ramp.advance(1)
        assert ramp.factor == 2.5
        ramp.advance(1)
        assert ramp.factor == 2

    def test_without_length_it_jumps(self) -> None:
        ramp = Ramp(0)
        ramp.aim(5.0)
        assert ramp.factor == 5


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"base_batch": 4}, 1.0),
        ({"base_batch": 1}, 4.0),
        ({"base_batch": 16}, 0.25),
        ({"base_batch": 1, "rule": "sqrt"}, 2.0),
        ({"base_batch": 1, "rule": lambda ratio: 1 + math.log(ratio)}, 1 + math.log(4)),
        ({"base_batch": 8, "batch_size": 64}, 8.0),
    ],
)
def test_rules_and_groups(options: dict[str, Any], factor: float) -> None:
    module = net()
    fit(module, LargeBatchLR(**options), max_epochs=1)
    assert len(module.optimizer.rates) == BATCHES
    for first, second in module.optimizer.rates:
        assert (first, second) == pytest.approx((0.1 * factor, 0.02 * factor))
    assert [group["lr"] for group in module.optimizer.param_groups] == [0.1, 0.02]


@pytest.mark.parametrize("tree", TREES)
def test_each_tree_counts_accumulation_and_prints_one_line(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    home = importlib.import_module(f"lightning_sparse.{tree}")
    package = importlib.import_module("lightning.pytorch" if tree == "lightning" else tree)
    module = net(package)
    callback = home.LargeBatchLR(base_batch=2, warmup_steps=3)
    assert isinstance(callback, package.Callback)
    trainer = fit(module, callback, tree=package, accumulate_grad_batches=3)
    assert rates(module) == pytest.approx([0.1 * x for x in (1, 1 + 5 / 3, 1 + 10 / 3, *[6] * 5)])
    lines = " ".join(capsys.readouterr().out.split())
    assert lines.count("LargeBatchLR:") == 1
    assert (
        "LargeBatchLR: 4 examples x 3 accumulated x 1 ranks = batch 12, 6 x the base batch 2: learning rates x 6"
        " (linear), from x 1 within 3 steps" in lines
    )
    assert trainer.callback_metrics["large_batch/factor"] == 6
    assert trainer.callback_metrics["large_batch/batch"] == 12


SCHEDULES: dict[str, Any] = {
    "step": lambda x: lr_scheduler.StepLR(x, 4, gamma=0.5),
    "exponential": lambda x: lr_scheduler.ExponentialLR(x, 0.9),
    "multiplicative": lambda x: lr_scheduler.MultiplicativeLR(x, lambda step: 0.95),
    "linear": lambda x: lr_scheduler.LinearLR(x, 0.1, total_iters=9),
    "polynomial": lambda x: lr_scheduler.PolynomialLR(x, 20, power=2.0),
    "cosine": lambda x: lr_scheduler.CosineAnnealingLR(x, 24),
    "restarts": lambda x: lr_scheduler.CosineAnnealingWarmRestarts(x, 5),
    "one cycle": lambda x: lr_scheduler.OneCycleLR(x, [0.4, 0.1], total_steps=30),
    "cyclic": lambda x: lr_scheduler.CyclicLR(x, 0.01, 0.1, step_size_up=5),
    "lambda": lambda x: lr_scheduler.LambdaLR(x, lambda step: 1 / (1 + step)),
    "sequence": lambda x: lr_scheduler.SequentialLR(
        x, [lr_scheduler.ConstantLR(x, 0.5), lr_scheduler.ExponentialLR(x, 0.9)], [7]
    ),
    "plateau": lambda x: lr_scheduler.ReduceLROnPlateau(x, patience=0, threshold=0.9, mode="max"),
}


class Metric(pl.Callback):
    """Falls, so that a plateau is seen at every look."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        module.log("metric", -float(trainer.global_step), on_step=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_composes_with_schedulers(name: str) -> None:
    alone, scaled = (net(schedule=SCHEDULES[name], monitor="metric") for _ in range(2))
    fit(alone, Metric())
    fit(scaled, Metric(), LargeBatchLR(base_batch=1, warmup_steps=5))
    assert len(set(rates(alone))) >= 5
    factors = [1 + 3 * min(step / 5, 1) for step in range(2 * BATCHES)]
    for step, (own, got) in enumerate(zip(alone.optimizer.rates, scaled.optimizer.rates, strict=True)):
        assert got == pytest.approx([factors[step] * lr for lr in own], rel=1e-12), step


def test_warm_up_in_epochs() -> None:
    module = net()
    fit(module, LargeBatchLR(base_batch=2, warmup_epochs=1.5), accumulate_grad_batches=2, max_epochs=3)
    # 6 steps an epoch, so 9 steps to a factor of 4
    assert rates(module) == pytest.approx([0.1 * (1 + 3 * min(step / 9, 1)) for step in range(18)])


def test_the_batch_may_change_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    module = net()
    accumulation = GradientAccumulationScheduler({0: 1, 1: 4})
    # ours runs before the scheduler's hooks
    fit(module, LargeBatchLR(base_batch=4, warmup_steps=2), accumulation)
    assert rates(module) == pytest.approx([0.1] * 12 + [0.1, 0.25, 0.4])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("LargeBatchLR") == 2
    assert "= batch 16 (it was 4), 4 x the base batch 4: learning rates x 4 (linear), from x 1 within 2 steps" in text


@pytest.mark.parametrize("unit", ["warmup_steps", "warmup_epochs"])
def test_resuming_is_exact(unit: str, tmp_path: Path) -> None:
    length = {"warmup_steps": 17, "warmup_epochs": 1.4}[unit]

    def make() -> list[Any]:
        return [
            LargeBatchLR(base_batch=1, **{unit: length}),
            ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1),
        ]

    schedule = SCHEDULES["exponential"]
    whole, rest = net(schedule=schedule), net(schedule=schedule)
    fit(whole, *make())
    fit(net(schedule=schedule), *make(), max_epochs=1)
    fit(rest, *make(), path=tmp_path / "epoch=0.ckpt")
    assert whole.optimizer.rates[BATCHES:] == rest.optimizer.rates
    assert rates(rest)[0] != rates(rest)[5] * 0.9**-5
    assert torch.equal(whole.layer.weight, rest.layer.weight)


def test_resuming_with_another_batch_moves_on_from_the_factor_in_force(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="saved")
    fit(net(), LargeBatchLR(base_batch=1, warmup_steps=24), saver, max_epochs=1)
    rest = net()
    fit(
        rest,
        LargeBatchLR(base_batch=1, warmup_steps=24),
        path=tmp_path / "saved.ckpt",
        max_epochs=2,
        accumulate_grad_batches=3,
    )
    # 12 of 24 steps from 1 to 4, then a line of 24 steps from there to 12
    assert rates(rest) == pytest.approx([0.1 * (2.5 + 9.5 * step / 24) for step in range(4)])


def test_a_second_fit_begins_anew() -> None:
    callback = LargeBatchLR(base_batch=1, warmup_steps=4)
    first, second = net(), net()
    for module in (first, second):
        fit(module, callback, max_epochs=1)
    assert first.optimizer.rates == second.optimizer.rates
    first.optimizer.step()
    assert rates(first)[-1] == 0.1


def test_an_exception_leaves_the_schedulers_own_rates() -> None:
    module = net()

    def stop(*_: Any) -> Tensor:
        assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
        raise RuntimeError("stopped")

    module.training_step = stop
    seen = []

    class Later(pl.Callback):
        def on_exception(self, *_: Any) -> None:
            seen.extend(group["lr"] for group in module.optimizer.param_groups)

    with pytest.raises(RuntimeError, match="stopped"):
        fit(module, LargeBatchLR(base_batch=1), Later())
    assert seen == [0.1, 0.02]


def test_a_step_that_was_left_by_an_exception_is_not_counted() -> None:
    class Failing(Recording):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if len(self.rates) == 1:
                raise ArithmeticError

    optimizer, counted = Failing([nn.Parameter(torch.ones(1))], lr=0.25), []
    steps = ScaledSteps(optimizer, lambda: 3.0, lambda: counted.append(1), "Test")
    with pytest.raises(ArithmeticError):
        optimizer.step()
    # as before the next batch
    steps.restore()
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.step()
    steps.close()
    optimizer.step()
    assert optimizer.rates == [[0.75], [0.75], [0.25]]
    assert counted == [1]


class Manual(pl.LightningModule):
    """Two optimizers; the second steps half as often."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 + index % 2]:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        self.both = [Recording([p], lr=0.1) for p in self.layer.parameters()]
        return self.both


def test_each_optimizer_has_a_warm_up_of_its_own() -> None:
    module = Manual()
    fit(module, LargeBatchLR(base_batch=1, batch_size=5, warmup_steps=4), max_epochs=1)
    for optimizer, steps in zip(module.both, (12, 6), strict=True):
        want = [0.1 * (1 + 4 * min(step / 4, 1)) for step in range(steps)]
        assert [lr for (lr,) in optimizer.rates] == pytest.approx(want)


def test_a_rate_that_is_a_tensor() -> None:
    weight = nn.Parameter(torch.ones(2))
    module = net()
    module.configure_optimizers = lambda: module.__dict__.setdefault(
        "optimizer", Recording([{"params": [weight, *module.parameters()], "lr": torch.tensor(0.1)}])
    )
    fit(module, LargeBatchLR(base_batch=2), max_epochs=1)
    assert [lr for (lr,) in module.optimizer.rates] == pytest.approx([0.2] * BATCHES)
    assert torch.equal(module.optimizer.param_groups[0]["lr"], torch.tensor(0.1))


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(torch.ones(3), torch.ones(1))] * 8)


@pytest.mark.parametrize(
    ("options", "loader", "message"),
    [
        ({}, [data(), data()], r"expected one training loader that knows its batch size, got 2 with \[4, 4\]: pass"),
        ({}, DataLoader(Endless(), batch_size=None), r"got 1 with \[None\]: pass batch_size="),
        ({"warmup_epochs": 1.0}, DataLoader(Endless(), 2), "expected a loader with a length for warmup_epochs"),
        ({"rule": lambda ratio: 1 - ratio}, None, "rule must give a positive factor, got -3"),
    ],
)
def test_what_is_known_only_when_training_begins(options: Any, loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"LargeBatchLR: .*{message}"):
        fit(net(), LargeBatchLR(base_batch=1, **options), loader=loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_batch": 0}, "base_batch must be an integer of at least 1, got 0"),
        ({"base_batch": 1.5}, r"base_batch must be an integer of at least 1, got 1\.5"),
        ({"batch_size": True}, "batch_size must be an integer of at least 1, got True"),
        ({"rule": "cubic"}, r"rule must be one of \['linear', 'sqrt'\] or a function, got 'cubic'"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0, got -1"),
        ({"warmup_epochs": math.nan}, "warmup_epochs must be at least 0, got nan"),
        ({"warmup_steps": 2, "warmup_epochs": 1.0}, r"expected warmup_steps or warmup_epochs, got both \(2 and 1.0\)"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"LargeBatchLR: {message}"):
        LargeBatchLR(**{"base_batch": 1} | options)


def test_two_owners_of_the_learning_rate_are_refused() -> None:
    class Other(pl.Callback):
        owns_learning_rate = True

    with pytest.raises(ValueError, match="alone in setting learning rates from the batch, got Other too"):
        fit(net(), LargeBatchLR(base_batch=1), Other())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    fit(Manual(), LargeBatchLR(base_batch=1), ModelCheckpoint(tmp_path, filename="x"), max_epochs=1)
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["LargeBatchLR"]
    callback = LargeBatchLR(base_batch=1)
    callback.load_state_dict(state)
    with pytest.raises(ValueError, match="expected a checkpoint of 1 optimizers, got one of 2"):
        fit(net(), callback)
