"""AutoWarmup on two real ranks: read from what `auto_warmup.py` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.auto_warmup import BATCHES, BEST, EPOCHS
from tests.integration.launch import run_ranks

SCRIPT = Path(__file__).with_name("auto_warmup.py")
STEPS = EPOCHS * BATCHES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("auto_warmup")
    run_ranks(SCRIPT, "popen", str(folder), cwd=folder, timeout=180)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_ranks_decide_alike_though_their_losses_differ(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]) == 9
    for name, run in ranks[0].items():
        for key in ("rates", "end", "peak", "checksum"):
            assert run[key] == ranks[1][name][key], (name, key)


@pytest.mark.parametrize("name", ["ddp", "updates", "gradients", "accumulated"])
def test_finds_the_best_rate_under_any_strategy(ranks: list[dict[str, Any]], name: str) -> None:
    run = ranks[0][name]
    assert BEST / 1.5 < run["peak"] < BEST * 1.5
    assert run["end"] % 4 == 0
    rates = [rates[0] for rates in run["rates"]]
    top = rates.index(max(rates))
    assert max(rates) > run["peak"] > rates[top + 4]
    assert all(rate[1] == pytest.approx(rate[0] / 4) for rate in run["rates"])
    # nothing is left of the rate behind the last step
    assert run["last"] == pytest.approx(0, abs=1e-9)
    assert set(run["metrics"]) == {"autowarmup/lr", "autowarmup/confidence"}


def test_losses_do_not_depend_on_the_strategy_so_rates_do_not(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["ddp"]["rates"] == ranks[0]["updates"]["rates"] == ranks[0]["gradients"]["rates"]
    assert ranks[0]["updates"]["steps"] == STEPS


def test_a_loss_is_the_mean_over_the_passes_of_its_step(ranks: list[dict[str, Any]]) -> None:
    """Otherwise it would be half of what it is, and the last step of an epoch, which has one pass, a quarter."""
    run = ranks[0]["accumulated"]
    assert run["steps"] == 2 * EPOCHS * (BATCHES // 2 + 1)
    assert run["rates"][0] == run["rates"][1] != run["rates"][2]


def test_not_a_number_on_one_rank_ends_the_growth_on_both(ranks: list[dict[str, Any]]) -> None:
    run = ranks[0]["diverges"]
    assert run["end"] < ranks[0]["updates"]["end"]
    assert BEST / 5 < run["peak"] < BEST


def test_a_real_model_gets_a_rate(ranks: list[dict[str, Any]]) -> None:
    run = ranks[0]["real"]
    assert run["end"] <= int(0.6 * STEPS)
    assert 1e-2 < run["peak"] <= 1


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_run_goes_on_as_if_it_had_not_stopped(ranks: list[dict[str, Any]], epoch: int) -> None:
    for rank in ranks:
        whole, rest = rank["whole"], rank[f"from {epoch}"]
        assert whole["saved"][:2] == [1, 2]  # losses that were not averaged yet
        assert whole["rates"][(epoch + 1) * BATCHES :] == rest["rates"]
        assert (whole["end"], whole["peak"], whole["checksum"]) == (rest["end"], rest["peak"], rest["checksum"])


def test_the_other_tree_spawned_ranks_and_one_rank(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "spawn", str(tmp_path), cwd=tmp_path, timeout=120)
    results = torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert 0 < results["spawn"]["metrics"]["autowarmup/lr"] < BEST
    assert BEST / 1.5 < results["one rank"]["peak"] < BEST * 1.5
