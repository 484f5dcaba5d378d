"""One fault of each kind, on two real ranks: each ends as documented. `faults.py` as a script injects sixty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.faults import FAULTS, TAPS, inject, verdict


@pytest.mark.parametrize("position", range(len(FAULTS)), ids=FAULTS)
def test_a_fault_ends_as_documented(position: int, tmp_path: Path) -> None:
    fault, tap, rank = FAULTS[position], TAPS[position % 2], position % 2
    ended = inject(tmp_path, tap, fault, 5, rank)
    assert verdict(fault, rank, ended) == "", ended.text[-3000:]
