"""The example scripts, run as a user runs them, with two processes."""

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.launch import run_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
KEYS = {
    "strategy",
    "exchange",
    "density",
    "bytes_per_step",
    "dense_bytes_per_step",
    "val_loss",
    "steps",
    "seconds_per_step",
    "train_seconds",
    "parameters",
    "ranks_equal",
    "world_size",
    "seed",
    "batch_size",
    "lr",
    "versions",
}


def run(script: str, *arguments: str, cwd: Path) -> Any:
    """Runs a script on two CPU processes from another directory and returns what it wrote as JSON."""
    fixed = ["--accelerator", "cpu", "--devices", "2", "--quiet", "--batch-size", "2", "--json", "out/result.json"]
    printed = run_ranks(EXAMPLES / script, *fixed, *arguments, cwd=cwd, timeout=300)
    assert "seconds per step" in printed
    return json.loads((cwd / "out/result.json").read_text())


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the examples as the scripts do."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in {
        "adascale_compression",
        "bench_tables",
        "cli",
        "common",
        "corpus",
        "elastic",
        "frontier",
        "large_batch_report",
        "network_table",
        "optimizers",
        "report",
        "tables",
        "train_digits",
        "train_large_batch",
        "train_lm",
    } & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.parametrize("strategy", ["ddp", "sparse_ddp"])
def test_lm_reports_a_flat_result(strategy: str, tmp_path: Path) -> None:
    row = run("train_lm.py", "--strategy", strategy, "--max-steps", "3", cwd=tmp_path)
    assert set(row) == KEYS | {"val_bits_per_byte", "model_size"}
    assert (row["strategy"], row["steps"], row["world_size"], row["batch_size"]) == (strategy, 3, 2, 2)
    assert row["exchange"] == {"ddp": "all_reduce", "sparse_ddp": "updates"}[strategy]
    assert row["parameters"] == 875_520
    assert row["dense_bytes_per_step"] == 8 * 875_520  # two ranks: half of the vector out and in, twice
    assert row["ranks_equal"] is True
    assert row["seconds_per_step"] > 0
    assert 4 < row["val_loss"] < 7
    if strategy == "ddp":
        assert (row["density"], row["bytes_per_step"]) == (1.0, row["dense_bytes_per_step"])
    else:
        assert row["bytes_per_step"] < row["dense_bytes_per_step"] / 5


@pytest.mark.parametrize("strategy", ["ddp", "sparse_ddp"])
def test_digits_reports_accuracy(strategy: str, tmp_path: Path) -> None:
    row = run("train_digits.py", "--strategy", strategy, "--max-steps", "3", cwd=tmp_path)
    assert set(row) == KEYS | {"val_accuracy"}
    assert row["exchange"] == {"ddp": "all_reduce", "sparse_ddp": "updates"}[strategy]
    assert row["ranks_equal"] is True
    assert 0 <= row["val_accuracy"] <= 1


def test_momentum_memory_trains_digits(tmp_path: Path) -> None:
    row = run("train_digits.py", "--exchange", "gradients", "--memory", "momentum", "--max-steps", "3", cwd=tmp_path)
    assert row["exchange"] == "gradients"


def test_comparing_a_strategy_with_itself_gives_the_same_loss(tmp_path: Path) -> None:
    arguments = ["--strategy", "ddp", "--compare", "ddp", "--max-steps", "4", "--plot", "out/curve.png"]
    rows = run("train_digits.py", *arguments, cwd=tmp_path)
    assert len(rows) == 2
    assert rows[0]["val_loss"] == rows[1]["val_loss"]
    assert (tmp_path / "out/curve.png").stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["curve.png", "out", "result.json"]


def test_files_are_split_by_name_alone(load: Any, tmp_path: Path) -> None:
    corpus = load("corpus")
    # the modules with crc32(path) % 10 == 0, in reading order: another answer changes every published loss
    held_out = (1, 17, 18, 21, 24, 28, 31, 7)
    names = [f"pkg/m{i}.py" for i in range(40)] + ["test/skipped.py", "pkg/tests/skipped.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    train, val = (bytes(text.tolist()).decode() for text in corpus.read(tmp_path))
    assert sorted((train + val).replace(">", ">\n").split()) == sorted(f"<{name}>" for name in names[:40])
    assert val == "".join(f"<pkg/m{i}.py>" for i in held_out)


def test_library_text_is_several_megabytes(load: Any) -> None:
    train, val = load("corpus").read()
    assert train.numel() > 4e6
    assert 0.03 < val.numel() / train.numel() < 0.3


def test_window_depends_on_seed_and_index_only(load: Any) -> None:
    corpus = load("corpus")
    text = torch.arange(250, dtype=torch.uint8)
    short, long = (corpus.Windows(text, 8, seed=3, length=length) for length in (5, 50))
    for index in range(5):
        inputs, targets = short[index]
        assert inputs.tolist() == long[index][0].tolist()
        assert targets.tolist() == [value + 1 for value in inputs.tolist()]
    starts = {int(long[index][0][0]) for index in range(50)}
    assert len(starts) > 35
    assert starts != {int(corpus.Windows(text, 8, seed=4, length=50)[index][0][0]) for index in range(50)}
    assert corpus.offset(0, 0) == 9669442505924063346


@pytest.mark.parametrize(
    ("size", "parameters"), [("tiny", 141_312), ("small", 875_520), ("medium", 4_903_168), ("large", 25_548_032)]
)
def test_model_size(load: Any, size: str, parameters: int) -> None:
    model = load("train_lm").GPT(size, lr=1e-3, schedule="cosine", max_steps=10)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_digits_split_is_disjoint_and_covers_all(load: Any) -> None:
    train, val = load("train_digits").split()
    assert sorted(train + val) == list(range(1797))
    assert (len(val), val[:3]) == (360, [665, 62, 438])


@pytest.mark.parametrize(("steps", "interval"), [(1, 1), (3, 1), (10, 1), (300, 30), (305, 61), (307, 307)])
def test_last_step_is_validated(load: Any, steps: int, interval: int) -> None:
    assert load("common").validation_interval(steps) == interval


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "momentum"], "--memory momentum needs --exchange gradients"),
        (["--strategy", "sparse_ddp_spawn"], "expected a strategy whose ranks return to this script"),
        (["--no-overlap", "--exchange", "gradients"], "--overlap: for updates only, got --exchange gradients"),
        (["--compare", "foo"], "expected a registered strategy"),
        (["--max-steps", "0"], "--max-steps must be at least 1, got 0"),
    ],
)
def test_refuses_options_that_do_not_fit(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    cli = load("cli")
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *arguments])
    with pytest.raises(SystemExit):
        cli.parse(cli.make_parser("", max_steps=1, batch_size=1, lr=0.1))
    assert message in capsys.readouterr().err


def test_the_readme_holds_the_tables_that_the_results_give(load: Any) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    tables = load("tables")
    for key in tables.BOARDS:
        assert tables.markdown(key) in readme, f"run examples/tables.py --print {key}"
    assert load("frontier").markdown() in readme, "run examples/frontier.py --print"


def test_elastic_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    printed = run_ranks(
        EXAMPLES / "elastic.py", "--steps", "2", "--json", "out/elastic.json", cwd=tmp_path, timeout=300
    )
    result = json.loads((tmp_path / "out/elastic.json").read_text())
    assert result["steps"] == 6
    for ranks, step in ((2, 2), (4, 4), (3, 6)):
        assert f"{ranks} ranks, step {step}: validation loss" in printed
    assert all(4 < result[name] < 6 for name in ("whole", "elastic"))


def test_large_batch_keeps_finished_runs_and_compares_with_the_base_batch(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("train_large_batch")
    short = dataclasses.replace(module.EXAMPLES["digits"], epochs=1, base_batch=32)
    monkeypatch.setitem(module.EXAMPLES, "digits", short)
    options = argparse.Namespace(
        examples=["digits"],
        rules=list(module.RULES),
        factors=[1, 4],
        seeds=[0],
        ranks=1,
        threads=torch.get_num_threads(),
        json=tmp_path / "out/rows.json",
        plot=tmp_path / "out/plot.png",
        quiet=True,
    )
    module.main(options)
    rows = json.loads(options.json.read_text())
    assert [(row["rule"], row["factor"]) for row in rows] == [("none", 1), *((rule, 4) for rule in module.RULES)]
    # 44 batches of 32 images; 11 steps of four of them
    assert [row["steps"] for row in rows if row["rule"] in ("none", "linear", "sqrt")] == [44, 11, 11, 11]
    assert len({row["val_loss"] for row in rows}) == len(rows)
    assert options.plot.stat().st_size > 1000
    shared = module.train("digits", "linear", 4, 0, ranks=2)
    assert (shared["ranks"], shared["steps"]) == (2, 11)
    # other micro-batches, and an exchange at 1 %
    assert shared["val_loss"] == pytest.approx(rows[2]["val_loss"], rel=0.5)
    capsys.readouterr()
    monkeypatch.setattr(module, "train", None)
    module.main(options)
    table = capsys.readouterr().out
    for row in rows[1:]:
        assert f"{row['val_loss']:.4f} ({row['val_loss'] / rows[0]['val_loss'] - 1:+.1%})" in table


def test_compression_shows_in_the_mean_that_arrives_and_not_in_sketches(load: Any) -> None:
    module = load("adascale_compression")
    options = argparse.Namespace(ranks=2, steps=40, over=20, lr=0.02, seed=0)
    got = module.row("gradients", 0.01, options)
    # of about 20 sketches, 6 % each
    assert got["sketch_variance"] == pytest.approx(got["exact_variance"], rel=0.06)
    assert got["sketch_gain"] == pytest.approx(got["exact_gain"], rel=0.06)
    assert got["exact_gain"] > 1.5
    assert got["arrived_gain"] < 1.2
    dense = module.row("dense", 1.0, options)
    assert dense["arrived_gain"] == pytest.approx(dense["exact_gain"])
    assert "arrived_gain" not in module.row("updates", 0.01, options)


def test_large_batch_marks_what_is_within_three_per_cent(load: Any) -> None:
    losses = {("none", 1): (1.9, 2.1), ("none", 4): (2.1, 2.4), ("linear", 4): (2.0, 2.1)}
    rows = [
        {"example": "lm", "rule": rule, "factor": factor, "seed": seed, "val_loss": loss}
        for (rule, factor), both in losses.items()
        for seed, loss in enumerate(both)
    ]
    assert load("large_batch_report").markdown(rows).splitlines() == [
        "| example | rule | batch x1 | batch x4 |",
        "| --- | --- | --- | --- |",
        "| lm | none | 2.0000 | 2.2500 (+12.5%) |",
        "| lm | linear | 2.0000 | 2.0500 (+2.5%) * |",
    ]


def test_the_readme_holds_the_table_of_the_network(load: Any) -> None:
    rows = json.loads((EXAMPLES / "results/network.json").read_text())["rows"]
    readme, tables = (ROOT / "README.md").read_text(), load("network_table")
    assert tables.table(rows) in readme
    rates = json.loads((EXAMPLES / "results/network-rates.json").read_text())["rows"]
    assert tables.table(rates) in readme
    for hosts in (2, 4):
        rows = json.loads((EXAMPLES / f"results/network-lm-{hosts}.json").read_text())["rows"]
        assert tables.losses(rows) in readme


def test_the_readme_holds_the_tables_of_benches(load: Any) -> None:
    readme, tables = (ROOT / "README.md").read_text(), load("bench_tables")
    kernels, layers = (
        json.loads((EXAMPLES / f"results/bench_{name}.json").read_text())["rows"] for name in ("kernels", "layers")
    )
    assert tables.table(kernels) in readme
    lines = tables.table(layers).splitlines()
    shown = readme[readme.index(lines[0]) :].split("\n\n")[0].splitlines()
    assert len(shown) > 15
    assert [line for line in shown if line not in lines] == []


def test_the_readme_holds_the_table_of_large_batches(load: Any) -> None:
    rows = json.loads((EXAMPLES / "results/large_batch.json").read_text())
    assert load("large_batch_report").markdown(rows) in (ROOT / "README.md").read_text()


def test_the_readme_holds_the_table_of_elastic(load: Any) -> None:
    rows = [json.loads(path.read_text()) for path in sorted((EXAMPLES / "results").glob("elastic-*.json"))]
    assert all(abs(row["elastic"] / row["whole"] - 1) < 0.01 for row in rows)
    assert load("elastic").table(rows) in (ROOT / "README.md").read_text()
