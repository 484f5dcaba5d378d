"""Virtual ranks: what they agree on, how they fail, and that more than two telescope."""

from __future__ import annotations

import pytest
import torch

from lightning_sparse.codecs import Quantized
from lightning_sparse.communicators import Checked, CompressedAllReduce, VirtualRanks
from lightning_sparse.compressors import WeightBlocks
from lightning_sparse.job import Job
from lightning_sparse.memory import Residual
from lightning_sparse.protocols import Transport
from lightning_sparse.reducer import Reducer
from lightning_sparse.sections import encode_sections
from lightning_sparse.vector import SparseVector
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


def test_checked_ranks_name_the_first_difference() -> None:
    def task(transport: Transport) -> str:
        checked = Checked(transport, torch.device("cpu"))
        checked.announce("model at step 3")
        mean = checked.all_reduce_mean_(torch.full((3,), float(transport.rank)))
        assert mean.tolist() == [1.0] * 3
        with pytest.raises(RuntimeError) as caught:
            checked.all_gather(torch.zeros(4 + (transport.rank == 1), dtype=torch.uint8))
        return str(caught.value)

    for message in VirtualRanks(3).run(task):
        assert "collective 2, all-gather of 4 bytes (torch.uint8) for model at step 3 on rank 0" in message
        assert "collective 2, all-gather of 5 bytes (torch.uint8) for model at step 3 on rank 1" in message


def test_values_that_differ_are_named() -> None:
    def task(transport: Transport) -> str:
        checked = Checked(transport, torch.device("cpu"))
        tensors = {"a": torch.zeros(3), "b.weight": torch.zeros(2, 2, dtype=torch.bfloat16), "c": torch.zeros(0)}
        checked.compare_values(tensors, 100)
        tensors["b.weight"][0, 0] = 1e-30 * (transport.rank == 2)
        with pytest.raises(RuntimeError) as caught:
            checked.compare_values(tensors, 200)
        return str(caught.value)

    for message in VirtualRanks(3).run(task):
        assert (
            "expected 'b.weight' to be bit-equal on all ranks after 200 steps, got another value on rank 2" in message
        )


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_what_a_compressed_mean_rounds_away_leaves_later(bits: int) -> None:
    """One block is averaged once, then zeros: the buffers empty, and the sum of all means is the mean."""
    sent = [torch.randn(600, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    indices, codec = torch.arange(50, 650, dtype=torch.int32), Quantized(bits)

    def task(transport: Transport) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        lost, total, came, first = torch.zeros(700), torch.zeros(700), torch.zeros(700), 0.0
        for step in range(60):
            values = sent[transport.rank] if step == 0 else torch.zeros(600)
            seen, wire = encode_sections(SparseVector(values, indices, 700), 3, codec)
            mean = CompressedAllReduce().mean(seen, wire, codec, transport, lambda: [lost[:333], lost[333:]])
            total += torch.stack([part.dense() for part in mean.parts]).sum(0)
            came += seen.dense()
            first = first or float(lost.norm())
        return total, came, first, float(lost.norm())

    results = VirtualRanks(3).run(task)
    expected = torch.stack([came for _, came, _, _ in results]).mean(0)
    for total, _, first, last in results:
        assert torch.equal(total, results[0][0])
        assert first > 0
        assert last < 0.05 * first
    torch.testing.assert_close(results[0][0], expected, rtol=0, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("codec", [Quantized(2), Quantized(8)])
def test_nothing_rounded_away_is_stuck_after_a_change_of_density(codec: Quantized) -> None:
    """Other ranks average the entries then; the sum of all means is still the mean of what came in."""
    came = [torch.randn(8, 700, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def task(transport: Transport) -> tuple[torch.Tensor, float]:
        def density(step: int) -> float:
            return 0.25 if step < 8 else 1.0

        memory, total = Residual(), torch.zeros(700)
        reducer = Reducer(WeightBlocks(), codec, CompressedAllReduce(), transport, density, torch.device("cpu"))
        for step in range(60):
            x = came[transport.rank][step].clone() if step < 8 else torch.zeros(700)
            job = Job("model", step, memory, ["w"], [x], [], [])
            outcome = reducer.exchange(reducer.pick(job))
            total += sum(part.dense() for part in outcome.mean.parts)
        reducer.close()
        state = memory.state_dict()
        return total, max(float(x["w"].abs().max()) for x in (state["lost"], state["residual"]))

    results = VirtualRanks(3).run(task)
    for _, left in results:
        assert left < 0.05
    expected = torch.stack(came).sum(1).mean(0)
    torch.testing.assert_close(results[0][0], expected, rtol=0, atol=0.1)
