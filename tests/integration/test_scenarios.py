"""What two real ranks must agree on after training: read from the files that `scenarios.py` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.launch import run_ranks

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scenarios")
    run_ranks(Path(__file__).with_name("scenarios.py"), str(folder), cwd=folder, timeout=240)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def same(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def largest_difference(first: Weights, second: Weights) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def collect(node: Any, path: str = "") -> dict[str, Weights]:
    """Every "weights" entry in a nested result."""
    if not isinstance(node, dict):
        return {}
    found = {path: node["weights"]} if "weights" in node else {}
    for key, child in node.items():
        found |= collect(child, f"{path}/{key}")
    return found


def test_ranks_are_bit_equal_after_every_scenario(ranks: list[dict[str, Any]]) -> None:
    first, second = (collect(rank) for rank in ranks)
    assert len(first) >= 14
    assert [path for path in first if not same(first[path], second[path])] == []
    for rank in ranks:
        assert same(rank["density_one"]["updates"], ranks[0]["density_one"]["updates"])


def test_density_one_with_gradients_is_ddp(ranks: list[dict[str, Any]]) -> None:
    """Bit for bit on two ranks: both divide by two, and a sum of two has one order."""
    assert same(ranks[0]["density_one"]["gradients"], ranks[0]["density_one"]["ddp"])


def test_density_one_with_updates_and_sgd_is_ddp(ranks: list[dict[str, Any]]) -> None:
    """The mean of rounded weights, not of gradients: a few units of float32 rounding after 20 steps."""
    results = ranks[0]["density_one"]
    assert largest_difference(results["updates"], results["ddp plain"]) < 5e-7
    assert largest_difference(results["updates"], results["ddp"]) > 1e-3


def test_density_one_with_the_momentum_memory_is_momentum_sgd(ranks: list[dict[str, Any]]) -> None:
    """The mean of the ranks' momenta is the momentum of the mean, up to the order of rounding."""
    results = ranks[0]["density_one"]
    assert largest_difference(results["momentum"], results["ddp"]) < 5e-6


@pytest.mark.parametrize("case", ["layer", "bucket", "model"])
def test_the_hook_is_called_on_the_cpu(ranks: list[dict[str, Any]], case: str) -> None:
    """20 batches in pairs: 10 synchronised backward passes; several buckets once DDP has rebuilt them."""
    hooks = ranks[0]["gradients_telescope"][case]["hooks"]
    assert sorted(hooks) == list(range(10))
    assert hooks[0] == 1
    later = {hooks[step] for step in range(2, 10)}
    assert later == {1} if case == "model" else min(later) > 1
    assert ranks[0]["gradients_telescope"][case]["summary"]["steps"] == 10


@pytest.mark.parametrize("case", ["layer", "bucket", "model"])
def test_gradients_telescope(ranks: list[dict[str, Any]], case: str) -> None:
    """The mean over ranks of what came in is what was applied plus the mean of what is kept."""
    terms = [rank["gradients_telescope"][case] for rank in ranks]
    for name in terms[0]["came"]:
        came = (terms[0]["came"][name] + terms[1]["came"][name]) / 2
        zero = torch.zeros_like(came)
        kept = sum(rank["kept"].get(name, zero) for rank in terms) / 2
        torch.testing.assert_close(came, terms[0]["applied"][name] + kept, rtol=0, atol=2e-7)
    assert any(float(x.abs().max()) > 1e-3 for x in terms[0]["kept"].values()), "nothing was ever kept back"


@pytest.mark.parametrize("case", ["overlap", "serial", "every", "eta", "blocks", "blocks serial"])
def test_updates_telescope(ranks: list[dict[str, Any]], case: str) -> None:
    """Progress summed over ranks = what the anchor moved, times world size over eta, plus what is unshared."""
    terms = [rank["updates_telescope"][case] for rank in ranks]
    for name, start in terms[0]["start"].items():
        progress = terms[0]["came"][name] + terms[1]["came"][name]
        moved = terms[0]["weights"][name].double().flatten() - start.flatten()
        unshared = terms[0]["unshared"][name] + terms[1]["unshared"][name]
        torch.testing.assert_close(progress, moved * 2 / terms[0]["eta"] + unshared, rtol=0, atol=2e-6)
    assert any(float(x.abs().max()) > 1e-3 for x in terms[0]["unshared"].values()), "nothing was ever kept back"


def test_the_anchor_is_shown_and_training_goes_on_from_own_weights(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["anchor_is_shown"] for rank in ranks)
    assert first["before"] != second["before"], "ranks had nothing of their own"
    assert first["seen"] == second["seen"]
    assert first["during"] == second["during"] == first["seen"][1]
    assert first["after"] != first["during"]
    assert first["after"] != second["after"]
    assert first["weights"]["layers.1.running_mean"].abs().max() > 0
    # ours have gone with the training
    assert first["callbacks"] == ["Snapshots", "ModelCheckpoint"]


def test_a_file_written_after_fit_knows_how_far_training_was(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        after, last = rank["anchor_is_shown"]["after_fit"], rank["anchor_is_shown"]["last"]
        assert after.keys() == last.keys()
        assert [part["steps"] for state in (last, after) for part in state["groups"]] == [14, 20]


def test_checkpoints_hold_what_ranks_share(
    ranks: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = ranks[0]["anchor_is_shown"]["files"]
    assert len(files) == 2
    folder = next(tmp_path_factory.getbasetemp().glob("scenarios*")) / "checkpoints"
    for name in files:
        state = torch.load(folder / name, weights_only=True)["state_dict"]
        step = int(name.removeprefix("step=").removesuffix(".ckpt"))
        for rank in ranks:
            for parameter, anchor in rank["anchor_is_shown"]["anchors"][step].items():
                assert torch.equal(state[parameter].flatten(), anchor), f"{parameter} in {name}"


@pytest.mark.parametrize("case", ["updates", "gradients"])
def test_manual_optimization_with_two_optimizers(ranks: list[dict[str, Any]], case: str) -> None:
    result = ranks[0]["manual"][case]
    for name, start in result["start"].items():
        assert not torch.equal(start, result["weights"][name]), f"{name} was not trained"


def test_residual_of_an_unused_parameter_waits(ranks: list[dict[str, Any]]) -> None:
    """DDP throws away what it is given for a parameter without gradient: nothing may be sent for it."""
    terms = [rank["unused"] for rank in ranks]
    for name in terms[0]["came"]:
        came = (terms[0]["came"][name] + terms[1]["came"][name]) / 2
        kept = sum(rank["kept"].get(name, torch.zeros_like(came)) for rank in terms) / 2
        torch.testing.assert_close(came, terms[0]["applied"][name] + kept, rtol=0, atol=2e-7)
    assert terms[0]["kept"]["branch.weight"].abs().max() > 1e-4


def test_row_sparse_gradients(ranks: list[dict[str, Any]]) -> None:
    results = ranks[0]["row_sparse"]
    assert largest_difference(results["dense"], results["ddp"]) < 1e-6
    assert largest_difference(results["sparse"], results["ddp"]) > 1e-6


def test_parameters_that_join_later_are_exchanged(ranks: list[dict[str, Any]]) -> None:
    """Layers unfrozen in the second epoch train, and stay equal on all ranks."""
    result = ranks[0]["finetuning"]
    assert not torch.equal(result["start"]["layers.0.weight"], result["weights"]["layers.0.weight"])


def test_a_teacher_outside_the_optimizers_is_shared(ranks: list[dict[str, Any]]) -> None:
    result = ranks[0]["outside"]
    assert not torch.equal(result["start"]["teacher.weight"], result["weights"]["teacher.weight"])


def test_a_loss_scale_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    """Powers of two scale exactly; the scale has grown in both runs, twice in 20 steps."""
    first, second = ranks[0]["scaled"]["from 1"], ranks[0]["scaled"]["from 4096"]
    assert (first["scale"], second["scale"]) == (4.0, 4096 * 4.0)
    assert same(first["weights"], second["weights"])
    assert same(first["kept"], second["kept"])


@pytest.mark.parametrize("case", ["updates", "gradients"])
def test_the_learning_rate_finder_leaves_no_trace(ranks: list[dict[str, Any]], case: str) -> None:
    assert same(ranks[0]["found"][f"{case} plain"]["weights"], ranks[0]["found"][f"{case} found"]["weights"])


@pytest.mark.parametrize("case", ["gradients", "blocks", "momentum", "dense"])
def test_gradients_that_are_not_finite_touch_nothing_on_any_rank(ranks: list[dict[str, Any]], case: str) -> None:
    """No weight and no moment of the optimizer, bit for bit; what is kept back, up to rounding."""
    for rank in ranks:
        before, after = rank["skipped"][case]["seen"]
        assert rank["skipped"][case]["skipped"] == rank["skipped"][case]["logged"] == 1
        assert same(before["weights"], after["weights"])
        assert all(torch.equal(x, y) for x, y in zip(before["moments"], after["moments"], strict=True))
        assert before["kept"].keys() == after["kept"].keys()
        for name, x in before["kept"].items():
            torch.testing.assert_close(after["kept"][name], x, rtol=1e-5, atol=1e-7)
        assert case == "dense" or any(x.abs().max() > 1e-3 for x in before["kept"].values())
        assert not same(after["weights"], rank["skipped"][case]["weights"]), "training did not go on"


def test_with_updates_only_the_rank_that_is_not_finite_skips(ranks: list[dict[str, Any]]) -> None:
    for position, rank in enumerate(ranks):
        before, after = rank["skipped"]["updates"]["seen"]
        unmoved = all(torch.equal(x, y) for x, y in zip(before["moments"], after["moments"], strict=True))
        assert unmoved == (position == 1)
        assert rank["skipped"]["updates"]["skipped"] == position
        assert all(x.isfinite().all() for x in rank["skipped"]["updates"]["weights"].values())


def test_no_optimizer_steps_on_a_bad_backward_pass(ranks: list[dict[str, Any]]) -> None:
    """The gradients of other buckets stay for later, with what had left of them; the bad one's stays out."""
    for rank in ranks:
        assert rank["poisoned_twice"]["skipped"] == 2
        assert all(x.isfinite().all() for x in rank["poisoned_twice"]["weights"].values())
        assert len(rank["poisoned_twice"]["lost"]) == 2
        assert max(rank["poisoned_twice"]["lost"].values()) < 1e-6


def test_ranks_that_part_ways_are_told(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        messages = rank["checked"]["messages"]
        assert "'head.weight' to be bit-equal on all ranks after 100 steps" in messages["weight gradients"]
        for tap in ("gradients", "updates"):
            assert "all-reduce of 20 bytes (torch.float32) for a small mean on rank 1" in messages[f"exchange {tap}"]
    assert same(ranks[0]["checked"]["debug False"]["weights"], ranks[0]["checked"]["debug True"]["weights"])


def test_errors_of_the_exchange_leave_sound_weights(ranks: list[dict[str, Any]]) -> None:
    """That each rank was told in words is asserted there; that ranks agree, by the first test here."""
    for case in ranks[1]["stopped"]:
        assert all(x.isfinite().all() for x in ranks[1]["stopped"][case]["weights"].values())


def test_ranks_that_disagree_are_told(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["disagreeing"]["messages"] for rank in ranks)
    assert first == second
    assert "density 0.05" in first["density"]
    assert "density 0.2" in first["density"]
    assert "Gradients" in first["exchange"]


def test_interrupted_training_leaves_the_anchor_and_no_worker(ranks: list[dict[str, Any]]) -> None:
    result = ranks[0]["interrupted"]
    assert not same(result["start"], result["weights"])
    assert "lightning_sparse" not in result["threads"]


def test_summary_counts_bytes(ranks: list[dict[str, Any]]) -> None:
    summary = ranks[0]["gradients_telescope"]["model"]["summary"]
    entries = round(0.05 * (32 * 64 + 64 * 64)) * 6  # the two large matrices: int32 index and bf16 value
    tail = (64 + 64 + 640 + 10) * 4  # everything smaller, averaged densely by a ring
    assert summary["bytes_per_step"] == 2 * entries + 2 * tail
    assert summary["dense_bytes_per_step"] == 2 * 4 * (32 * 64 + 64 + 64 * 64 + 64 + 640 + 10)
    updates = ranks[0]["updates_telescope"]["every"]["summary"]
    assert updates["exchange"] == "updates"
    assert updates["steps"] == 20
    assert ranks[0]["again"]["other tree"]["summary"]["exchange"] == "updates"
