"""What resumed ranks must agree on: read from the files that `resume.py` writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.launch import run_ranks
from tests.integration.resume import FAULTS, OF_RANKS, SEEDS, STRATEGIES, drawn

Results = list[dict[str, Any]]
# each takes two starts of two processes; more of them: KILLS=20 python -m pytest tests/integration/test_resume.py
KILLS = int(os.environ.get("KILLS", "2"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    return run(folder, 2, "two")


@pytest.fixture(scope="module")
def four(folder: Path, two: Results) -> Results:
    return run(folder, 4, "four")


@pytest.fixture(scope="module")
def three(folder: Path, four: Results) -> Results:
    return run(folder, 3, "three")


@pytest.fixture(scope="module")
def one(folder: Path, four: Results) -> dict[str, Any]:
    return run(folder, 1, "one")[0]["go on"]


def run(folder: Path, ranks: int, stage: str) -> Results:
    run_ranks(Path(__file__).with_name("resume.py"), str(folder), str(ranks), stage, cwd=folder, timeout=300)
    return [torch.load(folder / f"{stage}{rank}.pt", weights_only=False) for rank in range(ranks)]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_going_on_is_never_having_stopped(two: Results) -> None:
    """Twenty runs that were stopped at a step drawn at random: bit-equal, on both ranks."""
    runs = two[0]["exact"]
    resumed = [name for name in runs if "seed" in name]
    assert len(resumed) == SEEDS
    assert [name for name in resumed if not same(runs[name], runs[name.split(",")[0]])] == []
    assert [name for name in runs if not same(runs[name], two[1]["exact"][name])] == []


@pytest.mark.parametrize("seed", range(KILLS))
def test_going_on_where_all_ranks_were_killed(seed: int, folder: Path, two: Results) -> None:
    with pytest.raises(AssertionError, match=r"resume\.py: -9"):
        run(folder, 2, f"kill {seed}")
    for rank, result in enumerate(run(folder, 2, f"killed {seed}")):
        assert same(result["killed"], two[rank]["exact"][drawn(seed)[0]])


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_mean_of_what_is_owed_is_kept(name: str, two: Results, four: Results, three: Results) -> None:
    """From two ranks to four, and from four to three: by the mean in the file, and from the state of every rank."""
    for before, after in ((two, four), (four, three)):
        for kind in ("mean", "exact"):
            parts = [rank["save"][f"{name} {kind}"] for rank in before]
            for debt, by_name in parts[0].items():
                largest = 0.0
                for parameter in by_name:
                    mean = sum(part[debt][parameter] for part in parts) / len(parts)
                    # half-precision weights round what they take up
                    scale = 2.0**-8 if name == "bf16" else 1e-6
                    for rank in after:
                        mine = rank["go on"][f"{name} {kind}"]["owed"][debt][parameter]
                        torch.testing.assert_close(mine, mean, rtol=0, atol=scale)
                    largest = max(largest, float(mean.abs().max()))
                assert largest > 1e-5, f"nothing of {debt} was owed"


@pytest.mark.parametrize("kind", ["mean", "exact", "none"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_takes_over_what_four_owed(
    name: str, kind: str, folder: Path, four: Results, one: dict[str, Any]
) -> None:
    """With gradients it is kept for later steps; with updates it is made at once, as there is nobody to wait for."""
    parts, mine = [rank["save"][f"{name} {kind}"] for rank in four], one[f"{name} {kind}"]
    file = torch.load(folder / f"{name} {kind} 4" / "epoch=1.ckpt", weights_only=True)["state_dict"]
    means = {
        debt: {n: sum(part[debt][n] for part in parts) / len(parts) for n in by_name}
        for debt, by_name in parts[0].items()
    }
    if "progress" in means:
        assert mine["owed"] is None
        moved = {n: mine["begun"][n].double() - x.double() for n, x in file.items()}
        means = {"weights": {n: x if kind != "none" else 0 * x for n, x in means["progress"].items()}}
        mine = {"weights": {n: x.flatten() for n, x in moved.items()}}
    else:
        assert same(mine["begun"], file)
        mine = mine["owed"]
        means = means if kind != "none" else {debt: {} for debt in means}
    for debt, by_name in means.items():
        assert by_name.keys() == mine[debt].keys()
        for parameter, mean in by_name.items():
            # half-precision weights round what they take up
            torch.testing.assert_close(mine[debt][parameter], mean, rtol=0, atol=2.0**-8 if name == "bf16" else 1e-6)


def test_ranks_that_go_on_agree(two: Results, four: Results, three: Results) -> None:
    for results in (four, three):
        for case, first in results[0]["go on"].items():
            assert all(same(first["weights"], rank["go on"][case]["weights"]) for rank in results), case
    for case, weights in two[0]["others"].items():
        assert same(weights, two[1]["others"][case]), case


def test_nothing_is_owed_where_nothing_was_saved(four: Results) -> None:
    for name in STRATEGIES:
        owed = four[0]["go on"][f"{name} none"]["owed"]
        # half-precision weights are not where their anchor is
        rounding = 2.0**-10 if name == "bf16" else 0.0
        assert all(x.abs().max() <= rounding for parts in owed.values() for x in parts.values()), name


def test_damaged_states_are_refused_by_every_rank(two: Results) -> None:
    for rank in two:
        assert len(rank["refused"]) == 3 * len(FAULTS) + len(OF_RANKS)
        for case, message in rank["refused"].items():
            fault = case.split(": ")[1]
            first = "'layers.0.weight'"
            faults = ("shortened", "renamed", "without a parameter", "not finite", "of integers")
            named = dict.fromkeys(faults, first)
            name = named.get(fault, "expected")
            assert name in message, case


def test_a_file_holds_what_others_owe_where_one_rank_has_refused_every_step(two: Results) -> None:
    for rank in two:
        for name, kinds in (("gradients", {"residual"}), ("momentum", {"residual", "velocity"})):
            owed = rank["spoiled"][name]
            assert owed.keys() >= kinds
            for parts in owed.values():
                assert parts
                # nothing of a bad step stays with the good rank
                assert all(float(x.abs().max()) < 1e-6 for x in parts.values())


def test_a_rank_that_gives_up_leaves_no_bad_file(two: Results) -> None:
    for rank in two:
        assert rank["spoiled"]["files"] == []
        state = rank["spoiled"]["state"]
        assert state
        assert all(bool(x.isfinite().all()) for moments in state.values() for x in moments.values())
    assert same(two[0]["spoiled"]["weights"], two[1]["spoiled"]["weights"])
