"""Communicators and the reducer between 1, 2, 3 and 4 real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from lightning_sparse.communicators import VirtualRanks
from tests.integration import rank_checks
from tests.integration.loops import LOOPS


def compare_with_virtual_ranks(real: list[dict[str, torch.Tensor]]) -> None:
    """The same training runs among virtual ranks: every weight, buffer and byte count, bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, loop in LOOPS.items():
        for rank, result in enumerate(VirtualRanks(2).run(loop)):
            for key, x in result.items():
                assert torch.equal(real[rank][f"{name}: {key}"], x), f"{name}: {key} on rank {rank}"
    torch.set_num_threads(threads)


LARGEST_SHARE = {1: 34_490, 2: 18_000, 3: 13_000, 4: 12_000}
"""Of 1200 + 400 + 900 + 49 + 900 elements in each of 10 steps, by number of ranks."""


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks(world_size: int, tmp_path: Path) -> None:
    """Each rank checks its own results; here the ranks' results are compared bit for bit."""
    mp.spawn(rank_checks.main, args=(world_size, str(tmp_path)), nprocs=world_size)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world_size)]
    if world_size == 2:
        compare_with_virtual_ranks([result["loops"] for result in results])
    for kind in ("LARS", "LAMB"):
        assert results[0]["norms_divided"][f"{kind} elements of one rank"] == LARGEST_SHARE[world_size]
    for check, tensors in results[0].items():
        for name, expected in tensors.items():
            if "bytes" in name or ("gradients" in name and ("running" in name or "tracked" in name)):
                # a broadcast costs rank 0 more; with gradients each rank keeps its own statistics
                continue
            for rank, other in enumerate(results):
                assert torch.equal(other[check][name], expected), f"{check}: {name} on rank {rank} differs from rank 0"
