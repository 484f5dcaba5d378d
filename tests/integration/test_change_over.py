"""From the exchange to DDP and back, on two real ranks: read from the files that `guard_scenarios.py` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.guard_scenarios import BACK, THERE
from tests.integration.launch import run_ranks
from tests.integration.test_scenarios import collect, largest_difference, same


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("guard")
    run_ranks(Path(__file__).with_name("guard_scenarios.py"), str(folder), cwd=folder, timeout=180)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_ranks_are_bit_equal_at_the_end(ranks: list[dict[str, Any]]) -> None:
    first, second = (collect(rank) for rank in ranks)
    assert len(first) == 24
    assert [path for path in first if not same(first[path], second[path])] == []


def test_there_and_back_at_density_one_is_ddp(ranks: list[dict[str, Any]]) -> None:
    results = ranks[0]["plain"]
    assert largest_difference(results["updates"]["weights"], results["ddp"]["weights"]) < 5e-7


def test_ddp_trains_equal_weights_with_equal_moments(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["adam"] for rank in ranks)
    assert first["wrapped"] == [False] * (THERE - 1) + [True] * (21 - THERE)
    equal = [a == b for a, b in zip(first["sums"], second["sums"], strict=True)]
    assert equal == [False] * (THERE - 1) + [True] * (21 - THERE)
    assert len(first["moments"]) == 3 * 8
    assert all(torch.equal(a, b) for a, b in zip(first["moments"], second["moments"], strict=True))
    assert first["seen"] == second["seen"]
    assert first["summary"]["guard"]["is_dense"]


def test_ddp_takes_over_the_mean_of_all_progress(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["adam"] for rank in ranks)
    unlike = 0.0
    for name, after in first["after"].items():
        assert torch.equal(after, second["after"][name])
        mean = (first["before"][name] + second["before"][name]) / 2
        torch.testing.assert_close(after, mean, rtol=0, atol=2e-7)
        unlike = max(unlike, float((first["before"][name] - second["before"][name]).abs().max()))
    assert unlike > 1e-4, "ranks had nothing of their own"


def test_second_moments_become_those_of_the_mean_gradient(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["adam"] for rank in ranks)
    assert first["scales"] == second["scales"]
    assert max(first["scales"].values()) > 1.05, "nothing to scale"
    for name, after in first["squares_after"].items():
        mean = (first["squares"][name] + second["squares"][name]) / 2
        torch.testing.assert_close(after, mean / first["scales"][name] ** 2, rtol=1e-5, atol=0)


def test_moments_saved_under_ddp_are_one_ranks_again_where_the_exchange_goes_on(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for found in (rank["resumed"]["mean"], rank["resumed"]["exact"]):
            assert any(scale > 1.01 for scale in found["scales"].values())
            for name, saved in found["saved"].items():
                torch.testing.assert_close(found["squares"][name], saved * found["scales"][name] ** 2)


def test_bytes_of_ddp_are_counted(ranks: list[dict[str, Any]]) -> None:
    result = ranks[0]["adam"]
    parameters = sum(x.numel() for name, x in result["weights"].items() if name in result["scales"])
    total = 20 * result["summary"]["bytes_per_step"]
    # two ranks send and receive each gradient once; before, a few bits a weight and what is shared at the change
    dense = (20 - THERE) * 8 * parameters
    assert dense < total < 1.6 * dense


def test_ranks_have_own_weights_again_behind_ddp(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["there_and_back"] for rank in ranks)
    equal = [a == b for a, b in zip(first["sums"], second["sums"], strict=True)]
    assert equal == [False] * (THERE - 1) + [True] * (BACK - THERE + 1) + [False] * (20 - BACK)
    assert first["wrapped"] == [False] * (THERE - 1) + [True] * (BACK - THERE) + [False] * (21 - BACK)


def test_layers_that_join_behind_ddps_back_stay_equal(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["unfrozen"]["sums"] for rank in ranks)
    assert len(first) == 40
    assert first[THERE:] == second[THERE:]


@pytest.mark.parametrize("name", ["residual", "blocks"])
def test_what_was_kept_leaves_with_the_first_dense_exchange(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank["gradients"][name] for rank in ranks)
    for parameter, came in first["came"].items():
        mean = (came + second["came"][parameter]) / 2
        torch.testing.assert_close(first["applied"][parameter], mean, rtol=0, atol=2e-6)
        for rank in (first, second):
            if parameter in rank["kept"]:
                assert not rank["kept"][parameter].any()


@pytest.mark.parametrize("name", ["updates", "gradients"])
def test_ranks_measure_and_decide_alike(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank["measured"][name]["guard"] for rank in ranks)
    assert first == second
    assert {"is_dense", "step", "exchange", "all_reduce", "ddp_at_best"} <= first.keys()
    assert 0 < first["exchange"] < first["step"]
    assert first["all_reduce"] > 0


@pytest.mark.parametrize("tap", ["updates", "gradients"])
@pytest.mark.parametrize(
    ("link", "last"), [("room", "1.0 Quantized(bits=8, group=256)"), ("none", "0.0625 Quantized(bits=1, group=256)")]
)
def test_density_auto_takes_what_the_link_has_room_for(
    ranks: list[dict[str, Any]], tap: str, link: str, last: str
) -> None:
    for rank in ranks:
        rungs = rank["ladder"][f"{link} {tap}"]["rungs"]
        assert rungs[0] == "0.25 Quantized(bits=1, group=256)"
        assert rungs[-1] == last


def test_nan_under_ddp_is_every_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["poisoned"]["skip"]["skipped"] == 1
        assert "expected finite gradients on every rank" in rank["poisoned"]["raise"]["error"]
        for way in ("skip", "raise"):
            assert all(x.isfinite().all() for x in rank["poisoned"][way]["weights"].values())


def test_states_that_no_mean_exists_of_stay_with_the_exchange(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert not any(rank["refused"]["wrapped"])
        assert not rank["refused"]["guard"]["is_dense"]


def test_a_training_behind_the_learning_rate_finder_begins_with_the_exchange(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        # the finder's steps are not seen by the callback, and the change comes anew
        assert rank["found"]["wrapped"] == [False] * (THERE - 1) + [True] * (21 - THERE)
