"""`LSHLinear` with its rows on 2 and 3 real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.integration import lsh_checks


@pytest.mark.parametrize("world_size", [2, 3])
def test_lsh_ranks(world_size: int, tmp_path: Path) -> None:
    """Each rank checks its own results; what all must hold is compared bit for bit."""
    mp.spawn(lsh_checks.main, args=(world_size, str(tmp_path)), nprocs=world_size)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world_size)]
    for check, tensors in results[0].items():
        for name, expected in tensors.items():
            for other in results[1:]:
                assert torch.equal(other[check][name], expected), f"{check}: {name} differs between ranks"
