"""`LargeBatchLR`, `LARS` and `LAMB` over a sparse exchange at 1 % between two real ranks, and on one behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.launch import run_ranks

STEPS, LR = 24, 2.0**-7
OPTIMIZERS = ["sgd", "adamw", "lars", "lamb"]


def run(folder: Path, tree: str, ranks: int) -> tuple[str, list[dict[str, Any]]]:
    script = Path(__file__).with_name("large_batch.py")
    printed = run_ranks(script, tree, str(ranks), str(folder), cwd=folder, timeout=240)
    return " ".join(printed.split()), [torch.load(folder / f"{ranks}ranks-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("large_batch")


@pytest.fixture(scope="module")
def two(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    return run(folder, "pytorch_lightning", 2)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(x, right["weights"][name]) for name, x in left["weights"].items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_two_ranks_double_the_rate(two: Any, exchange: str, optimizer: str) -> None:
    for rank in two[1]:
        scaled, by_hand = (rank[f"{exchange} {optimizer} {way}"] for way in ("scaled", "by hand"))
        assert scaled["rates"] == by_hand["rates"] == [2 * LR * 0.5 ** (step // 9) for step in range(STEPS)]
        assert same(scaled, by_hand)
        assert same(scaled, two[1][0][f"{exchange} {optimizer} scaled"])
        first, last = (sum(scaled["losses"][part]) for part in (slice(0, 4), slice(-4, None)))
        assert last < 0.9 * first


def test_one_line_is_printed_on_rank_zero(two: Any) -> None:
    text = two[0]
    assert text.count("LargeBatchLR:") == 9
    assert text.count("8 examples x 1 accumulated x 2 ranks = batch 16, 2 x the base batch 8") == 9


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_norms_divided_over_ranks_change_no_bit(two: Any, optimizer: str) -> None:
    serial, divided = f"{optimizer} Serial", f"{optimizer} PTO"
    for rank in two[1]:
        assert same(rank[serial], rank[divided])
        assert rank[serial]["work"] == STEPS * (64 * 32 + 64 * 10)
    assert [rank[divided]["work"] for rank in two[1]] == [STEPS * 64 * 32, STEPS * 64 * 10]


def test_one_rank_goes_on_in_the_other_tree(two: Any, folder: Path) -> None:
    before = two[1][0]["warm-up"]["rates"]
    assert before == pytest.approx([LR * 0.5 ** (step // 9) * (1 + step / STEPS) for step in range(STEPS)])
    printed, (one,) = run(folder, "lightning", 1)
    assert "8 examples x 1 accumulated x 1 ranks = batch 8 (it was 16), 1 x the base batch 8" in printed
    assert "from x 2 within 24 steps" in printed
    # the scheduler goes on, and the factor falls from 2 to 1 as slowly as it rose
    steps = range(STEPS, 2 * STEPS)
    want = [LR * 0.5 ** (step // 9) * (2 - (step - STEPS) / STEPS) for step in steps]
    assert one["resumed"]["rates"] == pytest.approx(want)
