"""What the callbacks report from two real ranks: read from what `monitor_scenarios.py` writes and prints."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.launch import run_ranks

BYTES = 9_908
"""Of one step of the sparse scenarios: 2 * (307 entries * 6 bytes) + 2 * (778 dense elements * 4 bytes)."""


def run(way: str, folder: Path) -> str:
    script = Path(__file__).with_name("monitor_scenarios.py")
    return run_ranks(script, way, str(folder), cwd=folder, timeout=240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monitor")
    run("popen", folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def logged(folder: Path, name: str) -> list[dict[str, float]]:
    rows = csv.DictReader((folder / name / "version_0/metrics.csv").open())
    return [{k: float(v) for k, v in row.items() if v} for row in rows if row["sparse/density"]]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "manual"])
def test_training_is_bit_equal_with_and_without(ranks: list[dict[str, Any]], optimizer: str) -> None:
    weights = {rank[f"{optimizer} {way}"]["weights"] for rank in ranks for way in ("alone", "watched")}
    assert len(weights) == 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_loggers_get_rank_zero_figures_in_phase_with_the_trainer(folder: Path, optimizer: str) -> None:
    rows = logged(folder, optimizer)
    assert [row["step"] for row in rows] == [3, 7, 11]
    ratio = {"adamw": "unshared_over_update", "sgd": "residual_over_gradient"}[optimizer]
    for row in rows:
        assert row["sparse/density_asked"] == pytest.approx(0.05)
        # 102 + 205 entries of the two matrices, and 778 elements that are averaged densely, out of 6922
        assert row["sparse/density"] == pytest.approx((307 + 778) / 6922)
        assert 0.5 < row[f"sparse/{ratio}"] < 50
        assert row["sparse/share_exchange"] > 0
        assert 0 < row["sparse/share_select"] < 1
        assert {"sparse/share_encode", "sparse/share_decode"} < set(row)


def test_bytes_are_those_of_the_exchanges_that_ended(folder: Path, ranks: list[dict[str, Any]]) -> None:
    dense = ranks[0]["sgd watched"]["summary"]["dense_bytes_per_step"]
    assert dense == 2 * 4 * 6922
    for row in (*logged(folder, "sgd"), *logged(folder, "adamw")):
        assert row["sparse/bytes_per_step"] == BYTES
        assert row["sparse/bytes_over_dense"] == pytest.approx(BYTES / dense)


def test_layers_are_logged_only_when_asked_for(folder: Path) -> None:
    row = logged(folder, "sgd")[-1]
    layers = {key: value for key, value in row.items() if key.startswith("sparse/density/")}
    assert len(layers) == 6
    entries = layers["sparse/density/body.0.weight"] * 2048 + layers["sparse/density/body.2.weight"] * 4096
    assert entries == pytest.approx(307)
    # below dense_below elements
    assert layers["sparse/density/head.weight"] == 1
    assert not any("density/" in key for key in logged(folder, "adamw")[-1])


def test_metrics_reach_callbacks_without_a_logger(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        metrics = rank["manual watched"]["metrics"]
        assert 0.5 < metrics["sparse/unshared_over_update"] < 100
        assert 0.24 < metrics["sparse/density"] < 0.26
        assert "val_loss" in metrics


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "manual"])
def test_rank_zero_prints_one_table(ranks: list[dict[str, Any]], optimizer: str) -> None:
    printed = ranks[0][f"{optimizer} watched"]["printed"]
    exchange = "gradients" if optimizer == "sgd" else "updates"
    assert printed.count(f"{exchange} over 2 ranks, 12 steps") == 1
    assert "than 55.4 kB of dense float32" in printed
    assert "body.2.weight" in printed
    # averaged densely, except where ranks agree on the entries
    assert ("head.weight" in printed) == (optimizer == "manual")
    assert ranks[0][f"{optimizer} alone"]["printed"] == ranks[1][f"{optimizer} watched"]["printed"] == ""


def test_the_progress_bar_has_a_column(ranks: list[dict[str, Any]]) -> None:
    assert "15.7 % · 9.9 kB/step · 5.6x less" in ranks[0]["adamw watched"]["printed"]


def test_ddp_gets_one_warning_and_no_figures(ranks: list[dict[str, Any]]) -> None:
    result = ranks[0]["ddp"]
    assert result["warned"] == ["DensityMonitor: expected strategy='sparse_ddp', got DDPStrategy: nothing to report"]
    assert set(result["metrics"]) == {"val_loss"}
    assert "12/12" in result["printed"]
    assert "less" not in result["printed"]
    assert ranks[1]["ddp"]["warned"] == []


def test_the_other_tree_spawned_ranks_and_one_rank(tmp_path: Path) -> None:
    printed = run("spawn", tmp_path)
    assert printed.count("updates over 2 ranks, 12 steps") == 1
    results = torch.load(tmp_path / "rank0.pt")
    assert 0.24 < results["spawn"]["metrics"]["sparse/density"] < 0.26
    one = results["one rank"]
    assert set(one["metrics"]) == {"val_loss"}
    assert one["warned"] == []
    assert "less" not in one["printed"]
