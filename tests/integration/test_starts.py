"""Every start of `starts.py`, on real ranks; the README holds the table that comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launch import ROOT, run_ranks
from tests.integration.starts import STARTS, TAPS, table, verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


@pytest.mark.parametrize("name", STARTS)
def test_ranks_are_as_ddp_however_they_start(name: str, folder: Path) -> None:
    start = STARTS[name]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={start.ranks}"] if start.way == "torchrun" else []
    script = Path(__file__).with_name("starts.py")
    run_ranks(script, str(folder), start.way, str(start.ranks), cwd=folder, timeout=150, launcher=launcher)
    for way in TAPS:
        assert verdict(folder, start, way) == "as DDP"


def test_the_readme_holds_the_table(folder: Path) -> None:
    text = table(folder)
    assert text in (ROOT / "README.md").read_text(), text
