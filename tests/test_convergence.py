"""`bench convergence` through its public entry, on the digits example with few steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.__main__ import main
from lightning_sparse.bench import convergence
from lightning_sparse.bench.recipes import RECIPES
from lightning_sparse.bench.simulate import Problem, simulate

ROOT = Path(__file__).parents[1]
KEYS = {"example", "strategy", "compressor", "density", "steps", "val_loss", "dense_val_loss", "bytes_per_step"}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    # seed_everything leaves its seed in the environment
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    example = str(ROOT / "examples/train_digits.py")
    recipes = ["dense", "updates", "gradients"]
    fixed = ["bench", "convergence", "--example", example, "--cache", str(tmp_path / "cache"), "--steps", "6"]
    return [*fixed, "--points", "2", "--ranks", "3", "--lr", "0.05", "0.2", "--recipes", *recipes]


def test_rows_cache_and_plot(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    main([*arguments, "--json", str(out), "--plot", str(plot)])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6
    assert set(rows[0]) >= KEYS | {"bytes_to_target"}
    dense = [row["val_loss"] for row in rows if row["strategy"] == "dense"]
    assert len(dense) == 2
    assert all(row["dense_val_loss"] == min(dense) for row in rows), "dense is judged by its best learning rate"
    sparse = [row for row in rows if row["strategy"] != "dense"]
    assert all(row["bytes_over_dense"] < 0.5 for row in sparse)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "virtual ranks" in capsys.readouterr().out
    # a second call finds every run finished
    monkeypatch.setattr(convergence, "simulate", None)
    main([*arguments, "--json", str(out)])
    assert json.loads(out.read_text())["rows"] == rows


def test_an_example_must_offer_a_problem(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    arguments[3] = str(tmp_path / "empty.py")
    with pytest.raises(SystemExit, match="expected a function `problem`"):
        main(arguments)
    arguments[3] = str(tmp_path / "missing.py")
    with pytest.raises(SystemExit, match="expected an example script"):
        main(arguments)


def test_more_arguments_reach_the_problem(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "import train_lm\n"
        "def problem(seed, lr, max_steps, world_size, batch_size, name):\n"
        "    assert (batch_size, name) == (2, 'x')\n"
        "    raise SystemExit('reached')\n"
    )
    arguments[3] = str(tmp_path / "small.py")
    with pytest.raises(SystemExit, match="reached"):
        main([*arguments, "--set", "batch_size=2", "name=x"])
    with pytest.raises(SystemExit, match="--set expected NAME=VALUE, got 'batch_size'"):
        main([*arguments, "--set", "batch_size"])


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "muon"])
def test_the_examples_optimizers_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    words = "bench convergence --ranks 2 --steps 12 --points 4 --lr 0.01 --recipes blocks-1bit --density 0.5"
    main(
        [
            *words.split(),
            "--cache",
            str(tmp_path),
            "--example",
            str(ROOT / "examples/optimizers.py"),
            "--set",
            f"optimizer={name}",
        ]
    )
    (path,) = tmp_path.glob("*.json")
    losses = json.loads(path.read_text())["curve"]["losses"]
    assert losses[-1] < losses[0], "nothing was learned"


class Two(nn.Module):
    """Two weights with a target each, and an optimizer each."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))])
        self.form = form

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return sum(((p - batch[0].mean()).square().mean() for p in self.weights), torch.zeros(()))

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.training_step(batch))

    def log(self, *_: Any) -> None:
        """Replaced by the simulation."""

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam([p], lr=0.1) for p in self.weights]
        schedulers = [torch.optim.lr_scheduler.StepLR(x, 1, gamma=0.99) for x in optimizers]
        return self.form(optimizers, schedulers)


@pytest.mark.parametrize(
    "form",
    [
        lambda optimizers, schedulers: optimizers,
        lambda optimizers, schedulers: (optimizers, schedulers),
        lambda optimizers, schedulers: (optimizers, [{"scheduler": x, "interval": "step"} for x in schedulers]),
        lambda optimizers, schedulers: [{"optimizer": x} for x in optimizers],
        lambda optimizers, schedulers: [
            {"optimizer": x, "lr_scheduler": {"scheduler": y}} for x, y in zip(optimizers, schedulers, strict=True)
        ],
    ],
    ids=["list", "two lists", "dictionaries of schedulers", "dictionaries", "dictionaries with schedulers"],
)
def test_every_optimizer_steps_whatever_form_they_come_in(form: Callable[..., Any]) -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    problem = Problem(Two(form), loader, loader)
    curve = simulate(problem, RECIPES["blocks-1bit"], 2, 0.5, steps=60, points=2, tick=lambda: None)
    assert curve.losses[-1] < 0.05, "one of two weights at 0 would leave 1"
