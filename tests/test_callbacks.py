"""The parts of the callbacks, on numbers that are checked by hand."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
import threading
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_sparse as ls
from lightning_sparse.callbacks import layers, words
from lightning_sparse.callbacks.layers import Layer, LayerDensity, count_layers, density
from lightning_sparse.callbacks.progress_bar import _TrafficColumn
from lightning_sparse.callbacks.record import Record
from lightning_sparse.callbacks.table import make_table
from lightning_sparse.callbacks.window import Traffic, Window
from lightning_sparse.codecs import Raw
from lightning_sparse.communicators import AllGather
from lightning_sparse.compressors import TopK
from lightning_sparse.job import Job, Picked
from lightning_sparse.memory import Residual
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant
from lightning_sparse.vector import SparseVector

TREES = ["lightning_sparse.pytorch_lightning", "lightning_sparse.lightning"]


def picked(values: list[float], indices: list[int], step: int = 0, finite: bool = True) -> Picked:
    """Of two parameters with 4 and 6 elements, and one of 2 that is averaged densely."""
    inputs, dense = [torch.zeros(4), torch.zeros(6)], [torch.zeros(2)]
    job = Job("job", step, Residual(), ["a", "b"], inputs, ["bias"], dense)
    sent = SparseVector(torch.tensor(values), torch.tensor(indices, dtype=torch.int32), 10)
    return Picked(job, 0.4, sent, torch.zeros(1), torch.zeros(2), finite)


class TestLayers:
    def test_entries_are_counted_by_parameter(self) -> None:
        # padding at the end, and an entry that a codec rounded to zero in the middle
        got = count_layers([picked([1.0, -2.0, 0.0, 3.0, 0.0], [3, 4, 5, 9, 0])])
        assert got == {"a": Layer(1, 4), "b": Layer(2, 6), "bias": Layer(2, 2, is_dense=True)}
        assert density(got.values()) == 5 / 12

    def test_an_empty_payload_is_density_zero_of_what_is_sparse(self) -> None:
        got = count_layers([picked([0.0], [0])])
        assert (got["a"].entries, got["b"].entries) == (0, 0)

    def test_at_density_one_everything_was_sent(self) -> None:
        job = Job("job", 0, Residual(), ["a"], [torch.zeros(4)])
        assert count_layers([Picked(job, 1.0, None, None, torch.zeros(4))]) == {"a": Layer(4, 4)}

    def test_the_newest_exchange_of_a_parameter_counts(self) -> None:
        old, new = picked([1.0], [0], step=3), picked([1.0, 1.0], [1, 2], step=4)
        assert count_layers([new, old])["a"] == Layer(2, 4)

    def test_what_was_refused_is_left_out(self) -> None:
        assert count_layers([picked([math.nan], [0], finite=False)]) == {}
        assert math.isnan(density([]))

    def test_metric_sums_over_looks(self) -> None:
        metric = LayerDensity(["a", "b", "unseen"])
        metric.update({"a": Layer(1, 4), "b": Layer(0, 6)})
        metric.update({"a": Layer(2, 4)})
        assert metric.compute().tolist()[:2] == [3 / 8, 0]
        assert metric.compute()[2].isnan()


class Blocking:
    """A transport of two ranks that holds the same; an exchange waits until it is let go."""

    rank, world_size, bytes = 0, 2, 1000

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def announce(self, job: str) -> None:
        """Nothing."""

    def all_gather(self, buffer: Tensor) -> Tensor:
        assert self.go.wait(10)
        self.bytes += 100
        return torch.stack([buffer, buffer])

    def all_reduce_mean_(self, buffer: Tensor) -> Tensor:
        return buffer

    def broadcast_(self, buffer: Tensor) -> Tensor:
        return buffer


class Tap:
    """Sends one vector of 100 elements a step."""

    name = "updates"
    beside = 0

    def __init__(self, reducer: Reducer) -> None:
        self.reducer, self.steps = reducer, 0
        self.watch: Any = None
        self.watched: list[int] = []

    def step(self) -> Any:
        if self.watch is not None and self.watch(self.steps):
            self.watched.append(self.steps)
        memory = Residual()
        job = Job("job", self.steps, memory, ["w"], [torch.arange(100.0)], ["bias"], [torch.ones(10)])
        self.steps += 1
        return self.reducer.submit_picked(self.reducer.pick(job))

    def norms(self) -> dict[str, float]:
        return {"left": 6.0, "input": 2.0}


@dataclass
class Running:
    """A strategy with the two ranks in this process."""

    tap: Tap
    reducer: Reducer
    skipped: int = 0

    def summary(self) -> dict[str, Any]:
        return {"exchange": "updates", "world_size": 2, "dense_bytes_per_step": 880}


@pytest.fixture
def transport() -> Blocking:
    return Blocking()


@pytest.fixture
def running(transport: Blocking) -> Any:
    reducer = Reducer(TopK(), Raw(), AllGather(), transport, constant(0.05), torch.device("cpu"))
    yield Running(Tap(reducer), reducer)
    transport.go.set()
    reducer.close()


class TestWindow:
    def test_an_exchange_in_flight_is_neither_waited_for_nor_counted(self, running: Any, transport: Blocking) -> None:
        window = Window(running)
        assert window.look() is None
        running.tap.step().result(10)
        transport.go.clear()
        flight = running.tap.step()
        traffic = window.look()
        assert traffic is not None
        assert not flight.done()
        assert (traffic.steps, traffic.bytes_per_step, traffic.dense_bytes_per_step) == (1, 100, 880)
        assert set(traffic.shares) == {"select", "encode", "exchange", "decode"}
        assert window.look() is None
        transport.go.set()
        flight.result(10)
        running.tap.step().result(10)
        traffic = window.look()
        assert traffic is not None
        assert (traffic.steps, traffic.bytes_per_step) == (2, 100)

    def test_bytes_before_the_first_step_are_not_of_a_step(self, running: Any, transport: Blocking) -> None:
        transport.bytes += 10_000
        window = Window(running)
        running.tap.step().result(10)
        traffic = window.look()
        assert traffic is not None
        assert traffic.bytes_per_step == 100

    def test_bytes_of_ddp_count(self, running: Any) -> None:
        window = Window(running)
        running.tap.step().result(10)
        running.tap.beside += 500
        traffic = window.look()
        assert traffic is not None
        assert traffic.bytes_per_step == 100 + 2 * 500

    def test_the_clock_stops_for_validation(self, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("lightning_sparse.callbacks.window.time", SimpleNamespace(perf_counter=lambda: now[0]))
        window = Window(running)
        running.tap.step().result(10)
        running.reducer.totals.seconds["select"] = 1.0
        now[0] = 1.0
        window.pause()
        now[0] = 100.0
        window.resume()
        now[0] = 101.0
        traffic = window.look()
        assert traffic is not None
        assert traffic.shares["select"] == 0.5

    def test_a_snapshot_stays_as_it_is(self, running: Any) -> None:
        running.tap.step().result(10)
        totals, last = running.reducer.snapshot()
        before = dict(totals.seconds)
        running.tap.step().result(10)
        assert (totals.exchanges, totals.submitted, dict(totals.seconds)) == (1, 1, before)
        assert last["job"].job.step == 0


class TestRecord:
    def run(self, running: Any, record: Record, steps: int) -> list[dict[str, Any]]:
        looks = []
        for _ in range(steps):
            running.tap.step().result(10)
            if record.is_due():
                looks.append(record.look(per_layer=True))
        return looks

    def test_looks_are_every_so_many_steps(self, running: Any) -> None:
        record = Record(running, ["w", "bias"], every=3)
        looks = self.run(running, record, 7)
        assert running.tap.watched == [2, 5]
        assert len(looks) == 2
        shares = {f"share_{stage}" for stage in Window.stages}
        values = {key: float(value) for key, value in looks[1].items() if key not in shares}
        assert values == pytest.approx(
            {
                "density": 15 / 110,
                "density_asked": 0.05,
                "density/w": 0.05,
                "density/bias": 1.0,
                "bytes_per_step": 100,
                "bytes_over_dense": 100 / 880,
                "unshared_over_update": 3.0,
            }
        )
        assert shares < set(looks[1])

    def test_looks_are_in_phase_after_a_resume(self, running: Any) -> None:
        record = Record(running, ["w", "bias"], every=5, ahead=3)
        assert len(self.run(running, record, 8)) == 2
        assert running.tap.watched == [1, 6]

    def test_norms_do_not_wait_for_an_exchange(self, running: Any, transport: Blocking) -> None:
        record = Record(running, ["w", "bias"], every=1)
        transport.go.clear()
        flight = running.tap.step()
        assert {key: float(value) for key, value in record.look(per_layer=False).items()} == {
            "unshared_over_update": 3.0
        }
        assert not flight.done()

    def test_no_looks_still_give_a_table(self, running: Any) -> None:
        record = Record(running, ["w", "bias"], every=0)
        assert self.run(running, record, 4) == []
        text = show(record.table())
        assert "updates over 2 ranks, 4 steps" in text
        assert "5 % asked, 13.6 % sent" in text
        assert "unshared" not in text

    def test_nothing_exchanged_gives_no_table(self, running: Any) -> None:
        assert Record(running, ["w", "bias"], every=1).table() is None


def show(renderable: Any, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_table_names_three_extremes_each() -> None:
    traffic = Traffic(10.0, 2000.0, 64_000, {"select": 0.021, "exchange": 0.4}, {})
    densities = {f"layer{i}[weight]": i / 100 for i in range(8)}
    text = show(make_table("title", traffic, 0.01, 0.0142, "residual / gradient", 2.5, densities))
    rows = [line.strip("│ ") for line in text.splitlines() if line.startswith("│")]
    assert [" ".join(row.replace("│", "").split()) for row in rows] == [
        "density 1 % asked, 1.42 % sent with what is averaged densely",
        "bytes per step 2.0 kB, 32x less than 64.0 kB of dense float32",
        "share of step time select 2.1 %, exchange 40.0 %",
        "residual / gradient 2.5",
        "densest layers 7 % layer7[weight]",
        "6 % layer6[weight]",
        "5 % layer5[weight]",
        "sparsest layers 0 % layer0[weight]",
        "1 % layer1[weight]",
        "2 % layer2[weight]",
    ]


@pytest.mark.parametrize(
    ("width", "shown"),
    [(60, "1 % · 2.0 kB/step · 32x less"), (24, "2.0 kB/step · 32x less"), (20, "32x less"), (6, "32x l…")],
)
def test_the_column_shows_what_there_is_room_for(width: int, shown: str) -> None:
    column = _TrafficColumn(lambda: 0)
    column.words = ("1 %", "2.0 kB/step", "32x less")
    progress = Progress(column, console=Console(width=width))
    progress.add_task("train")
    assert show(progress.make_tasks_table(progress.tasks), width).strip() == shown


def test_the_column_is_empty_beside_other_bars() -> None:
    column = _TrafficColumn(lambda: 1)
    column.words = ("1 %", "2.0 kB/step", "32x less")
    progress = Progress(column, console=Console(width=60))
    progress.add_task("validate")
    assert show(progress.make_tasks_table(progress.tasks)).strip() == ""


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
def test_every_is_checked(every: Any) -> None:
    with pytest.raises(ValueError, match="DensityMonitor: every must be an integer of at least 1 or None, got"):
        ls.DensityMonitor(every=every)


@pytest.mark.parametrize("home", TREES)
def test_each_tree_has_its_own(home: str) -> None:
    module = importlib.import_module(home)
    tree = importlib.import_module(module.SparseDDPStrategy._tree)
    assert issubclass(module.DensityMonitor, tree.Callback)
    assert issubclass(module.SparseProgressBar, tree.callbacks.RichProgressBar)


def test_names_are_exported() -> None:
    from lightning_sparse import callbacks
    from lightning_sparse.pytorch_lightning import DensityMonitor, SparseProgressBar

    assert callbacks.DensityMonitor is ls.DensityMonitor is DensityMonitor
    assert callbacks.SparseProgressBar is ls.SparseProgressBar is SparseProgressBar
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        callbacks.Missing  # noqa: B018


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).sum()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(3, 2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_another_strategy_gets_one_warning() -> None:
    callbacks = [ls.DensityMonitor(), ls.SparseProgressBar()]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Net())
    messages = [str(warning.message) for warning in caught if "DensityMonitor" in str(warning.message)]
    assert messages == ["DensityMonitor: expected strategy='sparse_ddp', got SingleDeviceStrategy: nothing to report"]
    assert trainer.callback_metrics == {}
    # for the next fit of spawned ranks
    pickle.dumps(callbacks[0])


@pytest.mark.parametrize("module", [layers, words])
def test_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
