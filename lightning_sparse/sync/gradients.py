"""Gradients: DDP's buckets are exchanged sparsely during the backward pass."""

# no postponed annotations here: DDP compares the hook's with its own types
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_sparse.finite import gradients_are_finite
from lightning_sparse.job import Job, Outcome
from lightning_sparse.memory import fold
from lightning_sparse.protocols import Memory, Owed
from lightning_sparse.reducer import Reducer
from lightning_sparse.sync.flat import check_dense_below, is_small
from lightning_sparse.sync.observer import Observer

# backward passes after which a memory that is not empty stays so
_LOOKS = 3


@dataclass(frozen=True)
class Gradients:
    """Average gradients, with error feedback. Exact at density 1; right for SGD, with or without momentum.

    Every rank applies the same mean gradient, so the weights are bit-equal on all ranks at all times.

    Args:
        dense_below: parameters of fewer elements, and all vectors, are averaged densely; 0: none are.

    Example:
        >>> Gradients().name
        'gradients'
    """

    dense_below: int = 1024
    name: str = field(init=False, default="gradients")

    def __post_init__(self) -> None:
        check_dense_below("Gradients", self.dense_below)


@dataclass
class _Bucket:
    flat: Tensor
    names: list[str]
    pieces: list[Tensor]
    future: torch.futures.Future[Tensor]
    is_rows: bool
    scale: float


class GradientsTap:
    """Turns DDP's bucket hook into jobs for the reducer.

    Args:
        config: the options.
        reducer: does the work.
        memory: keeps what is not sent.
        module: whose ``named_parameters`` give the names.
        find_unused: parameters without any gradient keep their residual for later, as DDP discards what it is given.
        scale: the factor a loss scaler has put on the gradients; memories keep unscaled ones.
    """

    name = "gradients"

    def __init__(
        self,
        config: Gradients,
        reducer: Reducer,
        memory: Memory,
        module: nn.Module,
        find_unused: bool,
        scale: Callable[[], float],
    ) -> None:
        self.steps = 0
        self.watch: Callable[[int], bool] = lambda step: False
        self.observers: list[Observer] = []
        self._config = config
        self._reducer = reducer
        self._memory = memory
        self._empty = copy.deepcopy(memory)
        self._scale = scale
        self._error: BaseException | None = None
        self._refused = False
        self._outcomes: list[Outcome] = []
        self._module = module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._wrapped = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        self._order = {name: position for position, name in enumerate(self._names.values())}
        self._find_unused = find_unused
        self._waiting: list[_Bucket] = []
        self._watched = False
        self._squares = 0.0
        self._is_flushed = False
        self._looks = 0
        self.beside = 0

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook; DDP asks for this signature."""
        if bucket.index() == 0:
            self.steps += 1
            self._refused, self._outcomes = False, []
            self._watched = self.watch(self.steps - 1)
            self._squares = 0.0 if self._watched else self._squares
            self._is_flushed = self._is_flushed or (self._reducer.is_dense and self._all_keep_nothing())
        # observers see what passes through the reducer
        if self._is_flushed and not self.observers and not bucket.buffer().is_sparse:
            self.beside += 4 * bucket.buffer().numel()
            if self._watched:
                self._squares += float(bucket.buffer().double().square().sum()) / self._scale() ** 2
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]
        entry = self._open(bucket)
        if self._watched:
            self._squares += float(entry.flat.double().square().sum())
        self._waiting.append(entry)
        # a selection over the model needs every bucket; backward ends before any of them is sent
        if self._reducer.compressor.scope != "model" or bucket.is_last():
            buckets, self._waiting = self._waiting, []
            is_whole = self._reducer.compressor.scope == "model"
            self._submit("model" if is_whole else f"bucket {bucket.index()}", buckets)
        return entry.future

    def before_step(self, optimizer: Any, announced: bool = False) -> None:
        """Raise RuntimeError on a parameter that DDP does not know: ranks would train it apart, without a word."""
        for entry in optimizer.param_groups:
            for parameter in entry["params"]:
                if parameter.requires_grad and id(parameter) not in self._wrapped:
                    name = self._names.get(id(parameter), "a parameter outside the module")
                    raise RuntimeError(
                        f"Gradients: expected {name!r} to stay frozen, as it was when fit began, got"
                        " requires_grad=True: DDP exchanges no gradient of it. Unfreeze it before fit, or pass"
                        " exchange=Updates()"
                    )

    def end_step(self, optimizer: Any) -> None:
        """Nothing: the optimizer is as it was."""

    def after_step(self, optimizer: Any) -> None:
        """Nothing: the exchange happens in the backward pass."""

    def refuses(self, optimizer: Any) -> bool:
        # of the last backward pass, whichever optimizer asks, and however many do
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes if self._refused else []:
            job, sent = outcome.picked.job, outcome.picked.sent
            if outcome.finite and sent is not None:
                # what other buckets have sent arrives nowhere
                job.memory.give_back(job.names, sent)
        return self._refused or (self._is_flushed and not gradients_are_finite(optimizer))

    def give_up(self, message: str) -> None:
        # every rank has seen the same mean
        raise FloatingPointError(message)

    def check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def rest(self) -> str:
        # what averaging has rounded away leaves with the rest
        self.load_owed(self.owed(self._reducer.transport.world_size))
        self._reducer.is_dense = True
        return ""

    def resume(self) -> None:
        self._reducer.is_dense = self._is_flushed = False
        self._looks = 0

    def restart(self) -> None:
        self._memory = copy.deepcopy(self._empty)
        self.steps = 0

    def enter_shared(self) -> None:
        """Nothing: weights are equal on all ranks."""

    def leave_shared(self) -> None:
        """Nothing: weights are equal on all ranks."""

    def finish(self) -> None:
        """Nothing: weights are equal on all ranks."""

    def shared_state(self, together: bool = True) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])

    def own_state(self) -> dict[str, dict[str, Tensor]]:
        return self._memory.state_dict()

    def load_own_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._memory.load_state_dict({kind: state.get(kind, {}) for kind in self._memory.state_dict()})

    def owed(self, world_size: int) -> Owed:
        state = self._memory.state_dict()
        lost = state.pop("lost", {})
        return fold(state, "residual", lost, world_size)

    def load_owed(self, owed: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.load_own_state(owed)

    def equal(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._module.named_parameters() if p.requires_grad}

    def norms(self) -> dict[str, float]:
        return {"left": self._memory.norm(), "input": self._squares**0.5}

    def _all_keep_nothing(self) -> bool:
        """Whether no rank keeps anything back any more. Every rank calls it."""
        # what an unused parameter has stays kept, and a memory's momentum is never empty
        if self._find_unused or self._looks == _LOOKS:
            return False
        self._looks += 1
        keeps = any(bool(x.any()) for kept in self._memory.state_dict().values() for x in kept.values())
        return not self._reducer.on_any_rank(keeps)

    def _open(self, bucket: dist.GradBucket) -> _Bucket:
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        scale = self._scale()
        if buffer.is_sparse:
            rows = buffer.coalesce().to_dense()
            entry = _Bucket(rows, names, [rows], future, is_rows=True, scale=scale)
        else:
            entry = _Bucket(buffer, names, list(bucket.gradients()), future, is_rows=False, scale=scale)
        if scale != 1:
            entry.flat.div_(scale)
        return entry

    def _submit(self, name: str, buckets: list[_Bucket]) -> None:
        sparse: dict[str, Tensor] = {}
        dense: dict[str, Tensor] = {}
        pieces = [pair for bucket in buckets for pair in zip(bucket.names, bucket.pieces, strict=True)]
        # DDP rebuilds its buckets: what is picked must not depend on where a parameter lies in them
        for parameter, piece in sorted(pieces, key=lambda pair: self._order[pair[0]]):
            target = dense if is_small(piece, self._config.dense_below) else sparse
            target[parameter] = piece.view(-1)
        idle = [n for n, x in {**sparse, **dense}.items() if not x.any()] if self._find_unused else []
        job = Job(
            name,
            self.steps - 1,
            self._memory,
            list(sparse),
            list(sparse.values()),
            list(dense),
            list(dense.values()),
            idle,
        )
        for observer in self.observers:
            observer.before(job)

        def apply(outcome: Outcome) -> None:
            self._refused |= not outcome.finite
            self._outcomes.append(outcome)
            _write_back(outcome, buckets, self.observers)

        done = self._reducer.submit(job, apply)

        def fail(_: Any) -> None:
            # DDP would turn an exception in its future into another one: it gets a buffer, and `check` raises
            if (error := done.exception()) is not None:
                self._error = error
                for bucket in buckets:
                    if not bucket.future.done():
                        bucket.future.set_result(_result(bucket))

        done.add_done_callback(fail)


def _write_back(outcome: Outcome, buckets: list[_Bucket], observers: Sequence[Observer]) -> None:
    job = outcome.picked.job
    for bucket in buckets:
        bucket.flat.zero_()
    whole = [*job.inputs, *job.dense_inputs] if outcome.mean is None else job.dense_inputs
    for piece, mean in zip(whole, outcome.tail.split([x.numel() for x in whole]), strict=True):
        piece.copy_(mean)
    if not outcome.finite:
        # on every rank, wherever they were: later backward passes may add to them
        for bucket in buckets:
            bucket.flat.fill_(torch.nan)
    elif outcome.mean is not None:
        for part in outcome.mean.parts:
            part.add_to(job.inputs, alpha=outcome.mean.scale)
    for observer in observers:
        observer.after(outcome)
    for bucket in buckets:
        if bucket.scale != 1:
            bucket.flat.mul_(bucket.scale)
        bucket.future.set_result(_result(bucket))


def _result(bucket: _Bucket) -> Tensor:
    return _rows(bucket.flat) if bucket.is_rows else bucket.flat


def _rows(dense: Tensor) -> Tensor:
    """A COO tensor of the rows in which anything is not zero."""
    live = dense.flatten(1).any(dim=1).nonzero()  # [r, 1]
    return torch.sparse_coo_tensor(live.T, dense[live[:, 0]], dense.shape, is_coalesced=True, check_invariants=False)
