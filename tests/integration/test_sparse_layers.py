"""Training with sparse layers on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import run_ranks
from tests.integration.modes import STEPS
from tests.integration.sparse_layers import EVERY


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layers")
    run_ranks(Path(__file__).with_name("sparse_layers.py"), str(folder), cwd=folder, timeout=300)
    return [json.loads((folder / f"layers{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", ["ddp", "updates", "gradients"])
def test_blocks_move_alike_and_the_loss_falls(way: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (result[way] for result in ranks)
    assert first["mask"] == second["mask"]
    assert first["equal"]
    # the same blocks at the same places
    assert first["output"] == second["output"]
    assert first["moved"] == STEPS // EVERY
    assert sum(map(sum, first["mask"])) == 4
    assert first["after"] == first["again"] < 0.9 * first["before"]
