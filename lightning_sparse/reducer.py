"""Reducer: the one loop from a tap's vectors to their sparse mean over ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lightning_sparse.block import Block
from lightning_sparse.finite import is_usable, peak_of
from lightning_sparse.job import Job, Outcome, Picked, Totals
from lightning_sparse.kernels.pieces import KINDS
from lightning_sparse.protocols import Accumulator, Codec, Communicator, Compressor, Schedule, Transport
from lightning_sparse.random import Draw
from lightning_sparse.sections import encode_sections
from lightning_sparse.vector import SparseVector, concatenate
from lightning_sparse.worker import Worker

_T = TypeVar("_T")


class Reducer:
    """Runs accumulate, compress, encode, discard, mean for each job, in one order on every rank.

    Args:
        compressor, codec, communicator: the algorithm.
        transport: moves the bytes; nobody else uses it while a job is in flight.
        density: schedule of the fraction sent, in (0, 1]; 1 is a plain dense all-reduce, or all of it in the codec's
            few bits if it carries blocks.
        seed: of the counter-based draws.
        device: where the vectors live.
    """

    def __init__(
        self,
        compressor: Compressor,
        codec: Codec,
        communicator: Communicator,
        transport: Transport,
        density: Schedule,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.compressor = compressor
        self.transport = transport
        self.communicator = communicator
        self.density = density
        self.totals = Totals()
        self.last: dict[str, Picked] = {}
        self._codec = _TimedCodec(codec)
        self._sections = communicator.sections(transport.world_size)
        self.seed = seed
        self.device = device
        self.cut: dict[str, float] = {}
        """The density of each job's last exchange: with another one, other ranks average its entries."""
        self.is_dense = False
        """Whether every job is a plain dense all-reduce, whatever density and codec say."""
        self._lock = threading.Lock()
        self._worker = Worker(device)

    def submit(self, job: Job, apply: Callable[[Outcome], _T]) -> Future[_T]:
        """Run the whole loop for a job on the worker, then ``apply`` there."""
        self._begin()
        return self._worker.submit(lambda: self._finish(self.exchange(self.pick(job)), apply))

    def submit_picked(self, picked: Picked) -> Future[Outcome]:
        """Run only the exchange on the worker: what leaves was picked by the caller."""
        self._begin()
        return self._worker.submit(lambda: self.exchange(picked))

    def submit_mean(self, buffer: Tensor) -> Future[Tensor]:
        """Average a small buffer over ranks, behind the exchanges in flight: same shape and dtype."""

        def task() -> Tensor:
            self.transport.announce("a small mean")
            return self.transport.all_reduce_mean_(buffer)

        return self._worker.submit(task)

    def call(self, task: Callable[[], _T]) -> _T:
        """Run ``task`` on the worker, behind every exchange in flight, and wait: nobody else uses the transport."""

        def announced() -> _T:
            self.transport.announce("what is done between steps")
            return task()

        return self._worker.submit(announced).result()

    def averages_all(self, step: int) -> bool:
        """Whether that step's exchange is a plain dense all-reduce."""
        return not self._is_picked(self._density(step))

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """The mean over ranks of some numbers, bit-equal on all of them. Every rank calls it."""
        mine = torch.tensor(numbers, dtype=torch.float32, device=self.device)
        return [float(x) for x in self.call(lambda: self.transport.all_reduce_mean_(mine))]

    def on_any_rank(self, mine: bool) -> bool:
        """Whether it is so on any rank. Every rank calls it."""
        return self.agree([float(mine)])[0] > 0

    def pick(self, job: Job) -> Picked:
        """Steps 1 to 4 of the loop: what leaves this rank. No communication."""
        density, start = self._density(job.step), time.perf_counter()
        peak = 0.0 if job.is_safe else peak_of([*job.inputs, *job.dense_inputs])
        if not is_usable(peak):
            return self._refuse(job, density)
        # another density cuts another vector for the ranks to average
        if self.cut.setdefault(job.name, density) != density:
            self.cut[job.name] = density
            job.memory.reclaim(job.names, job.inputs, self.transport.world_size)
        held = job.memory.hold(job.idle)
        job.memory.begin([*job.inputs, *job.dense_inputs], peak)
        sent = wire = None
        whole: list[Tensor] = []
        accumulator = job.memory.accumulate(job.names, job.inputs)
        if job.names and self._is_picked(density):
            sent = self._compress(accumulator, job, density)
            self._count("select", start)
            start = time.perf_counter()
            sent, wire = encode_sections(sent, self._sections, self._codec)
            job.memory.discard(job.names, sent)
            self._count("encode", start)
        elif job.names:
            whole = accumulator.pieces()
        tail = _flat([*whole, *job.memory.dense(job.dense_names, job.dense_inputs)], job)
        if whole:
            self._count("select", start)
        job.memory.release(held)
        return Picked(job, density, sent, wire, tail)

    def exchange(self, picked: Picked) -> Outcome:
        """Step 5 of the loop: the mean over ranks. Every rank calls it in the same order."""
        start, decoding = time.perf_counter(), self._codec.seconds
        job, mean = picked.job, None
        self.transport.announce(f"{job.name} at step {job.step}")
        if picked.sent is not None and picked.wire is not None:
            mean = self.communicator.mean(
                picked.sent, picked.wire, self._codec, self.transport, lambda: job.memory.lost(job.names, job.inputs)
            )
            if mean.rejected is not None and picked.finite:
                job.memory.give_back(job.names, mean.rejected)
        tail = picked.tail.clone()
        if tail.numel():
            self.transport.all_reduce_mean_(tail)
        finite = bool(tail.isfinite().all()) and (mean is None or mean.finite)
        if picked.sent is None and finite:
            job.memory.discard_all([name for name in job.names if name not in job.idle])
        if not finite and picked.finite:
            pairs = zip((*job.names, *job.dense_names), (*job.inputs, *job.dense_inputs), strict=True)
            live = {name: x for name, x in pairs if name not in job.idle}
            job.memory.undo(list(live), list(live.values()))
        decoding = self._codec.seconds - decoding
        self._count("exchange", start + decoding)
        self._add("decode", decoding)
        self._total(picked)
        return Outcome(picked, mean, tail, finite)

    def use(self, density: Schedule, codec: Codec) -> None:
        """Another density and codec from the next job on. Every rank calls it, behind the same job."""
        self.call(lambda: None)
        self.density, self._codec = density, _TimedCodec(codec)

    def snapshot(self) -> tuple[Totals, dict[str, Picked]]:
        """Copies of ``totals`` and ``last`` that belong together. Waits for no exchange."""
        with self._lock:
            return replace(self.totals, seconds=self.totals.seconds.copy()), self.last.copy()

    def close(self) -> bool:
        """Stop the worker; False if it is stuck in an exchange that no other rank joins."""
        return self._worker.close()

    def _finish(self, outcome: Outcome, apply: Callable[[Outcome], _T]) -> _T:
        start = time.perf_counter()
        result = apply(outcome)
        self._count("decode", start)
        return result

    def _density(self, step: int) -> float:
        density = 1.0 if self.is_dense else float(self.density(step))
        if not 0 < density <= 1:
            raise ValueError(f"Reducer: density must be in (0, 1], got {density} from the schedule at step {step}")
        return density

    def _is_picked(self, density: float) -> bool:
        """Whether compressor and codec have a say; at density 1 only a codec that rounds whole blocks has one."""
        return density < 1 or (self._codec.agreed and not self.is_dense)

    def _compress(self, accumulator: Accumulator, job: Job, density: float) -> SparseVector:
        if not self.compressor.agreed:
            _check_dtypes(job)
        by_layer = self.compressor.scope == "layer"
        groups = accumulator.split() if by_layer else [accumulator]
        picked = []
        for group, name in zip(groups, job.names if by_layer else [job.name], strict=True):
            capacity = self.compressor.capacity(group.numel, density)
            picked.append(self.compressor.compress(group, capacity, Draw(self.seed, job.step, name)))
        return concatenate(picked)

    def _refuse(self, job: Job, density: float) -> Picked:
        """A payload of the usual size that says NaN: every rank learns of it in the same exchange, no memory does."""
        sent = wire = None
        is_picked = self._is_picked(density)
        whole = [] if is_picked else list(job.inputs)
        if job.names and is_picked:
            sizes = [x.numel() for x in job.inputs]
            sizes = sizes if self.compressor.scope == "layer" else [sum(sizes)]
            capacity = sum(self.compressor.capacity(size, density) for size in sizes)
            # the first entries, so that the payload keeps the invariants of a sparse vector
            nan = Block(torch.full((capacity,), torch.nan, device=job.inputs[0].device), 0, capacity, sum(sizes))
            sent, wire = encode_sections(nan, self._sections, self._codec)
        return Picked(job, density, sent, wire, _flat([*whole, *job.dense_inputs], job), finite=False)

    def _count(self, stage: str, start: float) -> None:
        self._add(stage, time.perf_counter() - start)

    def _add(self, stage: str, seconds: float) -> None:
        # the worker and the training loop both count
        with self._lock:
            self.totals.seconds[stage] += seconds

    def _begin(self) -> None:
        with self._lock:
            self.totals.submitted += 1

    def _total(self, picked: Picked) -> None:
        with self._lock:
            self.last[picked.job.name] = picked
            self.totals.exchanges += 1
            self.totals.bytes = self.transport.bytes
            self.totals.entries += picked.tail.numel() + (picked.sent.capacity if picked.sent is not None else 0)
            self.totals.numel += sum(x.numel() for x in (*picked.job.inputs, *picked.job.dense_inputs))


class _TimedCodec:
    """A codec that adds up the time spent decoding, which happens inside the communicator."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.seconds = 0.0

    @property
    def agreed(self) -> bool:
        return self._codec.agreed

    def nbytes(self, numel: int, capacity: int) -> int:
        return self._codec.nbytes(numel, capacity)

    def encode(self, vector: SparseVector) -> Tensor:
        return self._codec.encode(vector)

    def decode(self, wire: Tensor, numel: int, capacity: int) -> SparseVector:
        start = time.perf_counter()
        out = self._codec.decode(wire, numel, capacity)
        self.seconds += time.perf_counter() - start
        return out


def _flat(pieces: Sequence[Tensor], job: Job) -> Tensor:
    if pieces:
        return torch.cat([piece.float() for piece in pieces])
    device = job.inputs[0].device if job.inputs else None
    return torch.zeros(0, device=device)


def _check_dtypes(job: Job) -> None:
    for name, x in zip(job.names, job.inputs, strict=True):
        if x.dtype not in KINDS:
            raise TypeError(
                f"Reducer: expected float32, bfloat16 or float16 where entries are picked, got {x.dtype} in {name!r}:"
                " train with another precision, or with WeightBlocks and Updates"
            )
