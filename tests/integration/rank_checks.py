"""What every rank checks with real gloo peers; started by `test_ranks.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.codecs import Quantized, Raw
from lightning_sparse.communicators import ProcessGroup
from lightning_sparse.compressors import SampledTopK, TopK, WeightBlocks
from lightning_sparse.job import Job, Outcome
from lightning_sparse.memory import Residual
from lightning_sparse.optim import LAMB, LARS, PTO, Serial
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant, piecewise
from lightning_sparse.sections import encode_sections
from lightning_sparse.vector import SparseVector
from tests.integration.launch import run_checks
from tests.integration.loops import LOOPS
from tests.laws import CODECS, COMMUNICATORS

NUMEL = 5000
STEPS = 10


def normal(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def payload(rank: int, agreed: bool, count: int = 100) -> SparseVector:
    """Some entries of a vector, of this rank's own choice with padding at the end, or a block."""
    if agreed:
        return SparseVector(normal(rank, count), torch.arange(40, 40 + count, dtype=torch.int32), NUMEL)
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(NUMEL, generator=generator)[: count - 3].sort().values
    pad = torch.zeros(3)
    return SparseVector(torch.cat([normal(rank, count - 3), pad]), torch.cat([indices, pad.long()]).int(), NUMEL)


def add(parts: list[SparseVector], scale: float) -> Tensor:
    out = torch.zeros(NUMEL)
    for part in parts:
        out.index_add_(0, part.indices.long(), part.values * scale)
    return out


def communicators(transport: ProcessGroup) -> dict[str, Any]:
    out = {}
    world = transport.world_size
    for name, row in COMMUNICATORS.items():
        for codec_name, codec_row in CODECS.items():
            communicator, codec = row.build(), codec_row.build()
            agreed = row.agreed or codec_row.agreed
            assert (communicator.agreed, codec.agreed) == (row.agreed, codec_row.agreed)
            sections = communicator.sections(world)
            seen, wire = encode_sections(payload(transport.rank, agreed), sections, codec)
            before = transport.bytes
            lost = torch.zeros(NUMEL)
            mean = communicator.mean(seen, wire, codec, transport, lambda lost=lost: [lost[:70], lost[70:]])
            assert transport.bytes - before == communicator.nbytes(wire.numel(), world), name
            got = add(mean.parts, mean.scale)
            decoded = [encode_sections(payload(r, agreed), sections, codec)[0].dense() for r in range(world)]
            assert mean.rejected is None
            dist.all_reduce(lost)
            expected = torch.stack(decoded).double().mean(0)
            torch.testing.assert_close(got.double() + lost.double(), expected, rtol=1e-6, atol=1e-7)
            assert lost.norm() <= expected.norm()
            assert lost.any() or codec_row.exact or not row.agreed or world == 1
            out[f"{name} {codec_name}"] = got
    return out


class Recorder:
    """A tap for tests: hands over two parameters and keeps what comes back."""

    def __init__(self, reducer: Reducer, memory: Residual) -> None:
        self.reducer, self.memory = reducer, memory

    def step(self, step: int, gradient: Tensor, small: Tensor) -> Outcome:
        names, inputs = ["big", "other"], [gradient[:3000], gradient[3000:]]
        job = Job("job", step, self.memory, names, inputs, ["small"], [small])
        return self.reducer.submit(job, lambda outcome: outcome).result()


def make(transport: ProcessGroup, density: Any = 0.02, compressor: Any = None) -> Recorder:
    schedule = density if callable(density) else constant(density)
    device = torch.device("cpu")
    compressor = compressor or TopK()
    communicator = COMMUNICATORS["CompressedAllReduce" if compressor.agreed else "AllGather"].build()
    codec = Quantized(4) if compressor.agreed else Raw()
    reducer = Reducer(compressor, codec, communicator, transport, schedule, device)
    return Recorder(reducer, Residual())


def reducer_telescopes(transport: ProcessGroup) -> dict[str, Any]:
    """Mean of what came in = what came back + mean of what is kept; density 1 at first, then sparse."""
    out = {}
    compressors = {"model": TopK(), "layer": TopK(scope="layer"), "sampled": SampledTopK(), "blocks": WeightBlocks()}
    for name, compressor in compressors.items():
        tap = make(transport, piecewise({0: 1.0, 2: 0.02}), compressor)
        came, back, tail = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double(), torch.zeros(9).double()
        for step in range(12):
            gradient, small = normal(100 * step + transport.rank), normal(step + transport.rank, 9)
            came += gradient.double()
            outcome = tap.step(step, gradient, small)
            if outcome.mean is None:
                back += outcome.tail[:NUMEL].double()
            else:
                back += add(outcome.mean.parts, outcome.mean.scale).double()
            tail += outcome.tail[-9:].double()
        kept = torch.cat([tap.memory.state_dict()["residual"][n] for n in ("big", "other")]).double()
        lost = tap.memory.state_dict()["lost"]
        assert (len(lost) > 0) == (name == "blocks")
        owed = came - kept
        if lost:
            # a part of the mean, and not of what this rank owes
            owed -= transport.world_size * torch.cat([lost[n] for n in ("big", "other")]).double()
        dist.all_reduce(owed)
        torch.testing.assert_close(owed / transport.world_size, back, rtol=0, atol=5e-6)
        assert kept.abs().max() > 1, "nothing was ever kept back"
        tap.reducer.close()
        out[name] = torch.cat([back, tail])
    return out


def bad_rank(transport: ProcessGroup) -> dict[str, Any]:
    """NaN on the last rank: every rank learns of it, no memory takes it up, and the next step is sound."""
    return {type(compressor).__name__: _bad_rank(transport, compressor) for compressor in (TopK(), WeightBlocks())}


def _bad_rank(transport: ProcessGroup, compressor: Any) -> Tensor:
    # step 5 is dense, or all of it in few bits
    tap = make(transport, lambda step: 1.0 if step == 5 else 0.02, compressor)
    tap.step(0, normal(transport.rank), torch.ones(9))
    before = {name: x.clone() for name, x in tap.memory.state_dict()["residual"].items()}
    lost = {name: x.clone() for name, x in tap.memory.state_dict()["lost"].items()}
    last = transport.rank == transport.world_size - 1
    for where in ("sparse", "dense", "all"):
        gradient, small = normal(7 + transport.rank), torch.ones(9)
        if last:
            (small if where == "dense" else gradient)[2] = torch.nan
        outcome = tap.step(1 if where != "all" else 5, gradient, small)
        assert not outcome.finite, where
        now = tap.memory.state_dict()
        if where == "all" and lost and not last:
            # another density: what averaging has rounded away is each rank's own again
            before = {name: x + transport.world_size * lost[name] for name, x in before.items()}
            lost = {name: torch.zeros_like(x) for name, x in lost.items()}
        for name, x in now["residual"].items():
            # the others have added their gradient and taken it back, which rounds
            torch.testing.assert_close(x, before[name], rtol=0, atol=0 if last else 2e-6)
        assert all(torch.equal(x, lost[name]) for name, x in now["lost"].items()), where
    assert all(x.isfinite().all() for x in tap.memory.state_dict()["residual"].values())
    outcome = tap.step(2, normal(9 + transport.rank), torch.ones(9))
    assert outcome.finite
    assert outcome.mean is not None
    tap.reducer.close()
    assert all(x.isfinite().all() for kept in tap.memory.state_dict().values() for x in kept.values())
    return add(outcome.mean.parts, outcome.mean.scale)


def many_jobs(transport: ProcessGroup) -> dict[str, Any]:
    """Many small jobs in flight while the main thread uses the default group: order holds, nothing hangs."""
    tap = make(transport, 0.1)
    futures = []
    for step in range(60):
        gradient = normal(step + transport.rank, 40 + 17 * (step % 5))
        job = Job(f"bucket {step % 5}", step // 5, tap.memory, [f"p{step % 5}"], [gradient])
        futures.append(tap.reducer.submit(job, lambda outcome: outcome))
        noise = torch.ones(3)
        dist.all_reduce(noise)
        assert noise[0] == transport.world_size
    parts = [part.values for future in futures for part in future.result().mean.parts]
    tap.reducer.close()
    return {"values": torch.cat(parts)}


def loops(transport: ProcessGroup) -> dict[str, Any]:
    """Whole training runs, for comparison with the same runs on virtual ranks; byte counts from zero."""
    out = {}
    for name, loop in LOOPS.items():
        transport.bytes = 0
        out |= {f"{name}: {key}": x for key, x in loop(transport).items()}
    return out


def norms_divided(transport: ProcessGroup) -> dict[str, Any]:
    """Trust ratios whose norms are divided over ranks: the serial result bit for bit, each rank with its share."""
    out = {}
    shapes = [(40, 30), (30,), (20, 20), (300, 3), (7, 7), (1, 900)]
    numels = [math.prod(shape) for shape in shapes if len(shape) > 1]
    for make in (LARS, LAMB):
        operators = Serial(), PTO(transport)
        trained = []
        for operator in operators:
            weights = [torch.nn.Parameter(normal(i, math.prod(shape)).view(shape)) for i, shape in enumerate(shapes)]
            groups = [{"params": weights[:3]}, {"params": weights[3:], "weight_decay": 0.3, "lr": 0.1}]
            optimizer = make(groups, lr=0.02, weight_decay=0.01, operator=operator)
            for step in range(STEPS):
                for i, weight in enumerate(weights):
                    weight.grad = normal(100 * step + i, weight.numel()).view_as(weight)
                optimizer.step()
            trained.append([weight.detach() for weight in weights])
        assert all(map(torch.equal, *trained)), make
        serial, divided = (operator.elements for operator in operators)
        assert serial == STEPS * sum(numels)
        assert divided <= STEPS * (sum(numels) / transport.world_size + max(numels))
        total = torch.tensor(divided)
        dist.all_reduce(total)
        assert total == serial
        most = torch.tensor(divided)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        out |= {f"{make.__name__} {i}": x for i, x in enumerate(trained[1])}
        out[f"{make.__name__} elements of one rank"] = most
    own = PTO()
    assert own([3, 4], lambda layers: torch.tensor([float(i) for i in layers])).tolist() == [0.0, 1.0]
    own.close()
    return out


def failure(transport: ProcessGroup) -> dict[str, Any]:
    """An error on the worker reaches whoever waits, and everything after it, in words."""
    tap = make(transport, lambda step: 0.5 if step < 1 else 7.0)
    tap.step(0, normal(0), torch.ones(9))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got 7\.0 from the schedule at step 1"):
            tap.step(1, normal(0), torch.ones(9))
    tap.reducer.close()
    return {}


def main(rank: int, world_size: int, folder: str) -> None:
    checks = (communicators, reducer_telescopes, bad_rank, many_jobs, loops, norms_divided, failure)
    run_checks(checks, rank, world_size, folder)
