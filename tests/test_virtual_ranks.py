"""Virtual ranks: what they agree on, how they fail, and that more than two telescope."""

from __future__ import annotations

import pytest
import torch

from lightning_sparse.communicators import VirtualRanks
from lightning_sparse.protocols import Transport
from tests.integration.loops import LOOPS


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_collectives(world_size: int) -> None:
    def task(transport: Transport) -> list[torch.Tensor]:
        mine = torch.full((3,), float(transport.rank))
        gathered = transport.all_gather(mine)
        mean = transport.all_reduce_mean_(mine.clone())
        return [gathered, mean, transport.broadcast_(mine + 7), torch.tensor(transport.bytes)]

    for gathered, mean, sent, count in VirtualRanks(world_size).run(task):
        assert gathered[:, 0].tolist() == list(range(world_size))
        torch.testing.assert_close(mean, torch.full((3,), (world_size - 1) / 2))
        assert sent.tolist() == [7, 7, 7]
        assert int(count) > 0 or world_size == 1


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("world_size", [3, 8])
def test_ranks_end_equal(loop: str, world_size: int) -> None:
    results = VirtualRanks(world_size).run(LOOPS[loop])
    for other in results[1:]:
        for name, expected in results[0].items():
            if name != "bytes" and (("running" not in name and "num_batches" not in name) or "updates" in loop):
                assert torch.equal(other[name], expected), name


def test_an_error_on_one_rank_reaches_the_caller() -> None:
    def task(transport: Transport) -> None:
        if transport.rank == 1:
            raise RuntimeError("rank 1 has had enough")
        transport.all_gather(torch.zeros(1))

    ranks = VirtualRanks(3)
    with pytest.raises(RuntimeError, match="rank 1 has had enough"):
        ranks.run(task)
    assert ranks.run(lambda transport: transport.rank) == [0, 1, 2]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        VirtualRanks(0)
    with pytest.raises(ValueError, match="expected buffers of one size"):
        VirtualRanks(2).run(lambda transport: transport.all_gather(torch.zeros(transport.rank + 1)))
