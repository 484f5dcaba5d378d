"""What the callbacks that rule learning rates refuse, in both trees, before anything is trained."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.optim import AdaScale

TREES = {"pytorch_lightning": "lightning_sparse.pytorch_lightning", "lightning.pytorch": "lightning_sparse.lightning"}


def run(tree: str, make: Any, configure: Any, automatic: bool = True, epochs: int = 1, **options: Any) -> Any:
    """Fit eight batches under the callbacks that ``make`` gives, with what ``configure`` makes of the parameters."""
    pl, home = importlib.import_module(tree), importlib.import_module(TREES[tree])

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 2)
            self.automatic_optimization = automatic

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return self.layer(batch[0]).square().mean()

        def test_step(self, batch: list[Tensor]) -> None:
            self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return configure(self.parameters())

    callbacks = make(home)
    x = options.pop("x", torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    module, resume = Net(), options.pop("ckpt_path", None)
    trainer = pl.Trainer(callbacks=callbacks, **defaults | options)
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=2), ckpt_path=resume)
    return trainer, module


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def with_epochs(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def chained(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ChainedScheduler(parts), "interval": "step"}]


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "both": (
        lambda home: [home.AutoWarmup(), home.AdaScaleLR()],
        sgd,
        {"accumulate_grad_batches": 2},
        "AutoWarmup: expected to be alone in setting the learning rate, got AdaScaleLR too",
    ),
    "rule": (
        lambda home: [home.AdaScaleLR(), home.LargeBatchLR(base_batch=2)],
        sgd,
        {"accumulate_grad_batches": 2},
        "AdaScaleLR: expected to be alone in setting the learning rate, got LargeBatchLR too",
    ),
    "wrapper": (
        lambda home: [home.AutoWarmup()],
        lambda weights: AdaScale(sgd(weights), passes=2),
        {},
        "AutoWarmup: expected an optimizer without AdaScale, got one",
    ),
    "scheduler": (
        lambda home: [home.AutoWarmup()],
        with_epochs,
        {},
        "AutoWarmup: expected no scheduler, as it is one itself, got StepLR",
    ),
    "endless": (
        lambda home: [home.AutoWarmup()],
        sgd,
        {"max_epochs": -1},
        "AutoWarmup: expected a known number of steps, got inf",
    ),
    "chain": (
        lambda home: [home.AdaScaleLR()],
        chained,
        {"accumulate_grad_batches": 2},
        "AdaScaleLR: expected schedulers that count their steps in last_epoch, got ChainedScheduler: return the",
    ),
    "manual": (
        lambda home: [home.AutoWarmup()],
        sgd,
        {"automatic": False},
        "AutoWarmup: expected automatic optimization with one optimizer, got automatic_optimization=False",
    ),
    "one micro-batch": (
        lambda home: [home.AdaScaleLR(scale=4)],
        sgd,
        {},
        "AdaScale: expected at least 2 micro-batches a step, to tell noise from signal, got 1",
    ),
    "wrapper alone": (
        lambda home: [],
        lambda weights: AdaScale(sgd(weights), passes=2),
        {"accumulate_grad_batches": 2},
        r"AdaScale: expected observe_pass\(\) behind every backward pass of a step, got none",
    ),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_training_starts(tree: str, name: str) -> None:
    make, configure, options, message = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        run(tree, make, configure, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("AutoWarmup", {"lr_min": 2.0}, "expected 0 < lr_min < lr_max, got 2.0 and 1.0"),
        ("AutoWarmup", {"lr_max": math.inf}, "expected 0 < lr_min < lr_max, got 1e-05 and inf"),
        ("AutoWarmup", {"growth": 0.0}, r"growth must be in \(0, 1\], a share of the steps, got 0.0"),
        ("AutoWarmup", {"cooldown": 2}, r"cooldown must be in \(0, 1\], a share of the steps, got 2"),
        ("AutoWarmup", {"confidence": 1.0}, r"confidence must be in \[0.5, 1\), got 1.0"),
        ("AutoWarmup", {"patience": 0}, "patience must be an integer of at least 1, got 0"),
        ("AutoWarmup", {"test_every": 1.5}, "test_every must be an integer of at least 1 or None, got 1.5"),
        ("AdaScaleLR", {"scale": 1}, "scale must be above 1, got 1"),
        ("AdaScaleLR", {"steps": 0}, "steps must be an integer of at least 1 or None, got 0"),
        ("AdaScaleLR", {"power": 0}, r"power must be in \(0, 1\], got 0"),
    ],
)
def test_arguments_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    home = importlib.import_module("lightning_sparse.callbacks")
    with pytest.raises(ValueError, match=message):
        getattr(home, name)(**options)


def test_a_run_that_is_too_short_to_find_a_rate_is_warned_and_takes_a_careful_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_sparse"):
        # the loss grows with the rate
        x = (1 + torch.arange(16.0)).repeat_interleave(4).view(16, 4)
        trainer, _ = run("pytorch_lightning", lambda home: [home.AutoWarmup(lr_max=1e-4)], sgd, epochs=2, x=x)
    assert "AutoWarmup: expected at least 10 steps in which the rate grows, got 8 of 16 with growth=0.5" in caplog.text
    assert "AutoWarmup: expected at least 10 finite losses while the rate grew, got fewer" in caplog.text
    assert trainer.callbacks[0].warmup.peak == 1e-5


def test_a_rate_without_evidence_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_sparse"):
        trainer, _ = run(
            "pytorch_lightning",
            lambda home: [home.AutoWarmup(test_every=4)],
            sgd,
            epochs=4,
            x=torch.full((16, 4), math.nan),
        )
    assert "AutoWarmup: expected at least 10 finite losses while the rate grew, got fewer" in caplog.text
    assert trainer.callbacks[0].warmup.peak == 1e-5


def test_schedulers_of_epochs_are_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_sparse"):
        trainer, _ = run(
            "pytorch_lightning", lambda home: [home.AdaScaleLR()], with_epochs, epochs=2, accumulate_grad_batches=2
        )
    assert 'StepLR has no interval="step": it follows real epochs' in caplog.text
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


@pytest.mark.parametrize("tree", TREES)
def test_a_wrapper_and_a_callback_make_the_same_of_one_rank(tree: str) -> None:
    """The last step of an epoch has fewer passes than the others, and counts as what it is."""
    options = {"accumulate_grad_batches": 3, "epochs": 2, "limit_train_batches": 8}
    plain = run(tree, lambda home: [home.AdaScaleLR()], sgd, **options)
    wrapped = run(tree, lambda home: [home.AdaScaleLR()], lambda w: AdaScale(sgd(w), passes=3), **options)
    for first, second in zip(plain[1].parameters(), wrapped[1].parameters(), strict=True):
        assert torch.equal(first, second)
    rule = plain[0].callbacks[0]
    assert rule.gain.steps > plain[0].global_step
    assert plain[0].optimizers[0].param_groups[0]["lr"] == 0.1
    # hooks are gone: a step by hand takes the rate that is there
    weight = next(plain[1].parameters())
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    plain[0].optimizers[0].step()
    torch.testing.assert_close(before - weight.detach(), torch.full_like(weight, 0.1))


def test_double_precision() -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).double()
    rules, options = lambda home: [home.AdaScaleLR()], {"accumulate_grad_batches": 2}
    single, _ = run("pytorch_lightning", rules, sgd, x=x.float(), **options)
    double, _ = run("pytorch_lightning", rules, sgd, x=x, precision="64-true", **options)
    assert double.callbacks[0].gain.value == pytest.approx(single.callbacks[0].gain.value, rel=1e-3)


def test_a_last_step_of_fewer_passes_counts_as_its_share() -> None:
    """Gradients of all passes are the same, so that the gain is 1; the last step of an epoch has 2 passes of 6."""

    def same(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "interval": "step"}]

    options = {"epochs": 5, "accumulate_grad_batches": 6, "x": torch.ones(16, 4)}
    trainer, _ = run("pytorch_lightning", lambda home: [home.AdaScaleLR()], same, **options)
    assert trainer.callbacks[0].gain.steps == pytest.approx(5 * (1 + 2 / 6))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6 < trainer.global_step == 10


@pytest.mark.parametrize("frequency", [1, 4])
def test_schedulers_step_once_in_so_many_scale_invariant_steps(frequency: int) -> None:
    def configure(parameters: Any) -> Any:
        optimizer = sgd(parameters)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": frequency}]

    trainer, _ = run(
        "pytorch_lightning", lambda home: [home.AdaScaleLR()], configure, epochs=4, accumulate_grad_batches=4
    )
    config, steps = trainer.lr_scheduler_configs[0], trainer.callbacks[0].gain.steps
    assert config.scheduler.last_epoch == int(steps) // frequency
    assert trainer.global_step < steps
    assert config.frequency == frequency


@pytest.mark.parametrize(("scale", "last"), [(None, 4), (2, 4), (None, 1), (2, 1), (2, 2), (8, 1)])
def test_resuming_where_accumulation_has_changed_is_exact(scale: int | None, last: int, tmp_path: Path) -> None:
    """From 4 passes, or 2, to 4, 2 or 1: the base batch is that of the first epoch, and a step may become as small."""
    pl = importlib.import_module("pytorch_lightning")
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)

    def make(home: Any) -> list[Any]:
        return [home.AdaScaleLR(scale), pl.callbacks.GradientAccumulationScheduler({0: 4 if last < 4 else 2, 1: last})]

    trainer, whole = run("pytorch_lightning", lambda h: [*make(h), saver], sgd, epochs=2, enable_checkpointing=True)
    other, rest = run("pytorch_lightning", make, sgd, epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt")
    gains = [x.callbacks[0].gain for x in (trainer, other)]
    assert gains[0].state_dict() == gains[1].state_dict()
    assert equal(whole, rest)
    assert gains[0].scale == (scale or (4 if last < 4 else 2)) * last / (4 if last < 4 else 2)
    assert min(1, gains[0].scale) <= gains[0].value <= max(1, gains[0].scale)


def test_groups_that_are_added_on_the_way_have_gains_too() -> None:
    pl = importlib.import_module("pytorch_lightning")

    class Later(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers[0].add_param_group({"params": [module.layer.bias]})
                assert len(trainer.callbacks[0].state_dict()["means"]) == 2

    def make(home: Any) -> list[Any]:
        return [home.AdaScaleLR(), Later(), pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 4})]

    def one(parameters: Any) -> Any:
        return sgd([next(parameters)])

    trainer, _ = run("pytorch_lightning", make, one, epochs=2)
    gain = trainer.callbacks[0].gain
    assert gain.scale == 4
    assert gain.of_group(1) > 1


def test_accumulation_that_changes_keeps_the_base_batch() -> None:
    from pytorch_lightning.callbacks import GradientAccumulationScheduler

    trainer, _ = run(
        "pytorch_lightning",
        lambda home: [home.AdaScaleLR(), GradientAccumulationScheduler({0: 2, 1: 4})],
        sgd,
        epochs=2,
    )
    gain = trainer.callbacks[0].gain
    assert (gain.scale, gain.micro_batches) == (4, 4)
    assert 6 <= gain.steps <= 4 * 2 + 2 * 4


CALLBACKS: dict[str, Any] = {
    "AdaScaleLR": lambda home: home.AdaScaleLR(steps=18),
    "AutoWarmup": lambda home: home.AutoWarmup(growth=0.8, test_every=4),
    "LargeBatchLR": lambda home: home.LargeBatchLR(base_batch=1, warmup_steps=8),
}


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", CALLBACKS)
def test_what_a_test_loads_is_not_for_the_next_fit(name: str, tree: str, tmp_path: Path) -> None:
    path, callback = str(tmp_path / "end.ckpt"), CALLBACKS[name](importlib.import_module(TREES[tree]))
    options: dict[str, Any] = {"epochs": 4, "accumulate_grad_batches": 2}
    trainer, first = run(tree, lambda home: [callback], sgd, **options)
    trainer.save_checkpoint(path)
    trainer.test(first, DataLoader(TensorDataset(torch.ones(2, 4)), 2), ckpt_path=path, verbose=False)
    _, second = run(tree, lambda home: [callback], sgd, **options)
    assert equal(first, second)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_finder_leaves_no_trace_and_saves_what_a_run_resumes_from(name: str, tmp_path: Path) -> None:
    pl = importlib.import_module("pytorch_lightning")

    class Finder(pl.Callback):
        """What finders of learning rates and batch sizes do before training starts."""

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "finder.ckpt")
            trainer._checkpoint_connector._restore_modules_and_callbacks(tmp_path / "finder.ckpt")

    def two_groups(parameters: Any) -> Any:
        first, second = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)

    make, options = CALLBACKS[name], {"epochs": 4, "accumulate_grad_batches": 2}
    callback, save = make(importlib.import_module(TREES["pytorch_lightning"])), {"enable_checkpointing": True}
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    _, plain = run("pytorch_lightning", lambda home: [make(home), saver], two_groups, **options, **save)
    for _ in range(2):
        _, found = run("pytorch_lightning", lambda home: [callback, Finder()], two_groups, **options)
        assert equal(plain, found)
    resumed = {"ckpt_path": tmp_path / "epoch=0.ckpt"}
    run("pytorch_lightning", lambda home: [make(home), Finder()], two_groups, **options, **resumed)
    states = [torch.load(tmp_path / f"{x}.ckpt", weights_only=True)["callbacks"][name] for x in ("epoch=0", "finder")]
    assert str(states[0]) == str(states[1])


SCALED = {name: CALLBACKS[name] for name in ("AdaScaleLR", "LargeBatchLR")}


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCALED)
def test_a_rate_that_is_set_within_a_step_stays_and_is_warned_of_once(
    name: str, rate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pl = importlib.import_module("pytorch_lightning")

    class Setter(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            group = optimizer.param_groups[0]
            if isinstance(rate, Tensor):
                group["lr"].fill_(0.125)
            else:
                group["lr"] = 0.125

    def configure(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=rate)

    with caplog.at_level(logging.WARNING, "lightning_sparse"):
        trainer, _ = run(
            "pytorch_lightning", lambda home: [SCALED[name](home), Setter()], configure, accumulate_grad_batches=2
        )
    assert caplog.text.count(f"{name}: expected learning rates that stay while the optimizer steps, got one") == 1
    assert float(trainer.optimizers[0].param_groups[0]["lr"]) == 0.125


@pytest.mark.parametrize("name", SCALED)
def test_an_exception_that_somebody_catches_leaves_the_groups_own_rates(name: str) -> None:
    pl, seen = importlib.import_module("pytorch_lightning"), []

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if len(seen) == 4:
                raise ArithmeticError

    class Catching(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            step = module.optimizer_step

            def caught(*args: Any) -> None:
                with contextlib.suppress(ArithmeticError):
                    step(*args)

            module.optimizer_step = caught

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    run(
        "pytorch_lightning",
        lambda home: [SCALED[name](home), Catching()],
        lambda parameters: Failing(parameters, lr=0.25),
        epochs=2,
        accumulate_grad_batches=2,
    )
    assert seen == [0.25] * 16
