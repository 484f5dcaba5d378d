"""Every mode of `modes.py` on two real ranks; the README holds the table that comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import ROOT, run_ranks
from tests.integration.modes import MODES, TAPS, table, verdict

Results = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("modes")
    run_ranks(Path(__file__).with_name("modes.py"), str(folder), cwd=folder, timeout=300)
    return [json.loads((folder / f"modes{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", TAPS)
@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_as_ddp(name: str, way: str, ranks: list[Results]) -> None:
    expected = "refused" if way in MODES[name].refused else "as DDP"
    for result in ranks:
        assert verdict(MODES[name], result[name], way) == expected


def test_the_readme_holds_the_table(ranks: list[Results]) -> None:
    text = table(ranks[0])
    assert text in (ROOT / "README.md").read_text(), text
