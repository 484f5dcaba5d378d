"""AdaScaleLR on two real ranks and on one: read from what `adascale.py` writes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.adascale import STEPS
from tests.integration.launch import run_ranks

SCRIPT = Path(__file__).with_name("adascale.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("adascale")
    run_ranks(SCRIPT, "popen", str(folder), cwd=folder, timeout=180)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spawned")
    run_ranks(SCRIPT, "spawn", str(folder), cwd=folder, timeout=120)
    return torch.load(folder / "rank0.pt", weights_only=False)


def runs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every run of a rank, by name."""
    if "gains" in result:
        return {"": result}
    nested = {k: runs(value) for k, value in result.items() if isinstance(value, dict) and k != "sharded"}
    return {f"{key} {name}".strip(): run for key, found in nested.items() for name, run in found.items()}


def test_ranks_agree_bit_for_bit_in_every_run(ranks: list[dict[str, Any]]) -> None:
    first, second = (runs(rank) for rank in ranks)

    assert len(first) == 22
    for name, run in first.items():
        assert run["gains"] == second[name]["gains"], name
        assert run["checksum"] == second[name]["checksum"], name
        assert all(1 <= gain <= 4 for gains in run["gains"] for gain in gains), name
        assert max(gains[0] for gains in run["gains"]) > 1.2, name


@pytest.mark.parametrize("strategy", ["auto", "updates", "gradients"])
def test_two_ranks_equal_two_passes_of_one(ranks: list[dict[str, Any]], spawned: dict[str, Any], strategy: str) -> None:
    got, expected = spawned[strategy], ranks[0]["dense"]
    # squared norms are float32, and what is left of their difference is a tenth of them
    torch.testing.assert_close(torch.tensor(got["gains"][1::2]), torch.tensor(expected["gains"]), rtol=1e-5, atol=0)
    for name, x in got["weights"].items():
        torch.testing.assert_close(x, expected["weights"][name], rtol=1e-4, atol=1e-6)
    assert got["metrics"]["adascale/variance"] == pytest.approx(expected["metrics"]["adascale/variance"], rel=1e-4)
    assert got["scheduled"][-1] == expected["scheduled"][-1]


@pytest.mark.parametrize("name", ["gradients", "momentum", "rising", "updates", "default"])
def test_sketches_see_through_compression(ranks: list[dict[str, Any]], name: str) -> None:
    """Weights stay, so all runs see the same gradients: 24 sketches with an error of 6 % each, of about 0.9."""
    exact, sketched = ranks[0]["still"]["dense"]["state"][-1], ranks[0]["still"][name]["state"][-1]
    of_mean = 0.9 * 0.06 / math.sqrt(STEPS)
    totals = [{key: sum(state[key]) / state["weight"] for key in ("variances", "means")} for state in (exact, sketched)]
    # with two samples sigma^2 = 2 (each - |g|^2), mu^2 = 2 |g|^2 - each
    for key in ("variances", "means"):
        assert 0 < abs(totals[0][key] - totals[1][key]) < 4 * 2 * of_mean


def test_rates_are_multiplied_within_a_step_and_schedulers_follow(ranks: list[dict[str, Any]]) -> None:
    run = ranks[0]["dense"]
    for step in range(1, STEPS):
        gains, rates, inside = run["gains"][step - 1], run["rates"][step - 1], run["inside"][step]
        assert inside == pytest.approx([rates[0] * gains[1], rates[1] * gains[2]])
        worth = run["steps"][step] - run["steps"][step - 1]
        assert worth == pytest.approx(gains[0])
        assert run["scheduled"][step] == int(run["steps"][step])
        assert run["rates"][step] == pytest.approx([rate * 0.99 ** int(run["steps"][step]) for rate in (0.05, 0.1)])
    assert run["inside"][0] == [0.05, 0.1]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_training_stops_by_scale_invariant_steps(ranks: list[dict[str, Any]], exchange: str, optimizer: str) -> None:
    run = ranks[0][f"{exchange} {optimizer}"]
    assert run["steps"][-2] < 30 <= run["steps"][-1]
    assert run["global_step"] == len(run["steps"]) < STEPS
    assert run["scheduled"][-1] == 30
    figures = {f"adascale/{name}" for name in ("gain", "variance", "mean", "noise_scale", "steps")}
    assert figures <= set(run["metrics"])


def test_a_wrapped_optimizer_keeps_its_scale(ranks: list[dict[str, Any]]) -> None:
    run = ranks[0]["wrapped"]
    assert 1.3 < run["gains"][-1][0] <= 1.5
    assert run["inside"][5] == pytest.approx([run["rates"][4][at] * run["gains"][4][at + 1] for at in range(2)])


@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_a_bad_step_is_not_counted_by_anybody(ranks: list[dict[str, Any]], exchange: str) -> None:
    run = ranks[0][f"bad {exchange}"]
    assert run["steps"][5] == run["steps"][4]
    assert run["gains"][5] == run["gains"][4]
    assert run["steps"][6] > run["steps"][5]
    assert run["scheduled"][-1] == int(run["steps"][-1])


def test_a_loss_scaler_does_not_show(ranks: list[dict[str, Any]]) -> None:
    scaled, plain = ranks[0]["scaled"], ranks[0]["unscaled"]
    # both run in bfloat16
    torch.testing.assert_close(torch.tensor(scaled["gains"]), torch.tensor(plain["gains"]), rtol=1e-3, atol=0)
    assert scaled["metrics"]["adascale/mean"] == pytest.approx(plain["metrics"]["adascale/mean"], rel=0.02)


def test_units_do_not_depend_on_passes(ranks: list[dict[str, Any]]) -> None:
    """Two ranks with two passes each see about the same noise of a micro-batch as two ranks with one."""
    twice, once = ranks[0]["unscaled"]["metrics"], ranks[0]["dense"]["metrics"]
    assert twice["adascale/variance"] == pytest.approx(once["adascale/variance"], rel=0.1)
    assert twice["adascale/gain"] == pytest.approx(3.4, abs=0.3)  # of 4


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_a_run_goes_on_as_if_it_had_not_stopped(ranks: list[dict[str, Any]], exchange: str) -> None:
    for rank in ranks:
        whole, rest = rank[f"resumed {exchange}"]["whole"], rank[f"resumed {exchange}"]["rest"]
        assert whole["state"][8:] == rest["state"]
        assert whole["rates"][8:] == rest["rates"]
        assert whole["checksum"] == rest["checksum"]


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_gradients_of_ranks_are_seen_whatever_the_guard_wants(ranks: list[dict[str, Any]], exchange: str) -> None:
    run = ranks[0][f"guard {exchange}"]
    gains = [gains[0] for gains in run["gains"]]
    assert len(set(gains)) == STEPS
    # identical gradients would be worth one step each
    assert all(gain > 1.7 for gain in gains[3:])
    worth = [b - a for a, b in itertools.pairwise(run["steps"])]
    assert worth == pytest.approx(gains[:-1])


def test_sharded_optimizer_states_change_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["sharded"]["whole"] == rank["sharded"]["shards"] == ranks[0]["sharded"]["whole"]
        assert 1 < rank["sharded"]["whole"][3] < 2


def test_stock_ddp_is_refused_with_advice(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["ddp"].startswith("AdaScaleLR: expected strategy='sparse_ddp' on 2 ranks, got DDPStrategy")


def test_the_other_tree_and_spawned_ranks(spawned: dict[str, Any]) -> None:
    metrics = spawned["spawn"]["metrics"]
    assert 1.5 < metrics["adascale/gain"] < 2
    assert 30 < metrics["adascale/steps"] < 48
