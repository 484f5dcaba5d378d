"""Communicators and the reducer between 1, 2, 3 and 4 real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.integration import rank_checks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks(world_size: int, tmp_path: Path) -> None:
    """Each rank checks its own results; here the ranks' results are compared bit for bit."""
    mp.spawn(rank_checks.main, args=(world_size, str(tmp_path)), nprocs=world_size)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world_size)]
    for check, tensors in results[0].items():
        for name, expected in tensors.items():
            for rank, other in enumerate(results):
                assert torch.equal(other[check][name], expected), f"{check}: {name} on rank {rank} differs from rank 0"
