"""Checkpoint: what ranks owe each other, in the file that Lightning writes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.checkpoint_checks import KINDS, VERSION, RefusedError, check, layout_of, shapes
from lightning_sparse.nested import mapped
from lightning_sparse.protocols import Owed, Tap
from lightning_sparse.reducer import Reducer

log = logging.getLogger(__name__)


def check_kind(kind: Any) -> None:
    """Raise ValueError unless it says how to keep what ranks owe."""
    if kind not in KINDS:
        raise ValueError(f"SparseDDPStrategy: residual_checkpoint must be one of {KINDS}, got {kind!r}")


def save(
    kind: str,
    tap: Tap,
    reducer: Reducer,
    optimizers: Sequence[Mapping[str, Any]],
    device: torch.device,
    together: bool = True,
) -> Any:
    """What goes into the file: tensors on the CPU and plain values. Rank 0's result counts.

    Args:
        kind: "exact", "mean" or "none".
        tap: whose debts are saved.
        reducer: averages them.
        optimizers: this rank's optimizer states.
        device: whose generator is saved.
        together: every rank calls it; otherwise ``kind`` is "none".
    """
    state: dict[str, Any] = {"version": VERSION, "kind": kind, "exchange": tap.name}
    state["shared"] = _to_cpu(tap.shared_state(together))
    state["cut"], state["cut_by"] = dict(reducer.cut), _cut_by(reducer)
    if kind == "none":
        return state
    world = reducer.transport.world_size
    if kind == "mean":
        owed = _to_cpu(_mean(reducer.call(lambda: tap.owed(world)), reducer))
        return state | {"owed": owed, "layout": layout_of(owed)}
    own = tap.own_state()
    mine = {
        "own": own,
        "layout": layout_of(own),
        "optimizers": list(optimizers),
        "shapes": shapes(optimizers),
        "generators": _generators(device),
    }
    ranks: list[Any] | None = [None] * world if reducer.transport.rank == 0 else None
    dist.gather_object(_to_cpu(mine), ranks)
    return state | {"ranks": ranks}


def load(
    state: Any,
    tap: Tap,
    reducer: Reducer,
    module: nn.Module,
    device: torch.device,
    take: Callable[[Sequence[Mapping[str, Any]]], None],
) -> None:
    """Take over what ``save`` has made. Every rank calls it with the same state, and either none of them raises or all.

    Args:
        state: of the file, None if it has none.
        tap: owes it from now on.
        reducer: agrees on whether all is well.
        module: whose parameters it must be of.
        device: whose generator is set.
        take: is given this rank's optimizer states, if they are in the file.

    Raises:
        ValueError: the state belongs to another model, or something of it is missing.
    """
    if state is None:
        log.info("sparse_ddp: the checkpoint is of another strategy; nothing is owed yet")
        return
    problem: Exception | None = None
    try:
        check(state, tap, module)
        _take(state, tap, reducer, device, take)
    except RefusedError as error:
        # the same on every rank
        raise ValueError(str(error)) from None
    except Exception as error:  # of any kind, as anything may stand in a damaged file
        problem = error
    # a rank that has raised would leave the others waiting in their first step
    if reducer.on_any_rank(problem is not None):
        what = "its own output says what it lacks" if problem is None else f"{type(problem).__name__}: {problem}"
        raise ValueError(
            f"sparse_ddp: expected a whole state in the checkpoint, got a damaged one on at least one rank: {what}"
        ) from problem


def _take(
    state: Any,
    tap: Tap,
    reducer: Reducer,
    device: torch.device,
    take: Callable[[Sequence[Mapping[str, Any]]], None],
) -> None:
    if state["kind"] == "none":
        log.warning("sparse_ddp: the checkpoint holds nothing of what ranks owed each other; they begin with none")
        if state["exchange"] != tap.name:
            # counters and measured factors mean nothing to the other exchange
            return
    world = reducer.transport.world_size
    mine = None
    if state["kind"] == "exact" and len(state["ranks"]) == world:
        mine = state["ranks"][reducer.transport.rank]
        # before the shared state, which belongs to these optimizers and may change them
        take(list(mine["optimizers"]))
    tap.load_shared_state(state["shared"])
    # with other parts every density is another cut
    is_same = state["cut_by"] == _cut_by(reducer)
    reducer.cut = {str(name): float(density) if is_same else 0.0 for name, density in state["cut"].items()}
    if state["kind"] == "none":
        return
    if state["kind"] == "mean":
        tap.load_owed(state["owed"])
        return
    if mine is not None:
        tap.load_own_state(mine["own"])
        _set_generators(mine["generators"], device)
        return
    ranks = state["ranks"]
    log.warning(
        f"sparse_ddp: the checkpoint is of {len(ranks)} ranks, there are {world}: each of them begins with the mean of"
        " what those owed"
    )
    total: Owed = {}
    for rank in ranks:
        tap.load_own_state(rank["own"])
        for kind, parts in tap.owed(len(ranks)).items():
            for name, x in parts.items():
                share = x.double() / len(ranks)
                known = total.setdefault(kind, {})
                known[name] = known[name] + share if name in known else share
    tap.load_owed({kind: {name: x.float() for name, x in parts.items()} for kind, parts in total.items()})


def _to_cpu(state: Any) -> Any:
    """Copies of all tensors: training goes on while the file is written."""
    return mapped(state, lambda x: x.detach().to("cpu", copy=True))


def _mean(owed: Owed, reducer: Reducer) -> Owed:
    """The mean over ranks, of every kind and name that any of them has."""
    mine = {(kind, name): x for kind, parts in owed.items() for name, x in parts.items()}
    known: list[Any] = [None] * reducer.transport.world_size
    # a rank that has refused every step so far keeps nothing yet
    dist.all_gather_object(known, {key: x.numel() for key, x in mine.items()})
    sizes = {key: numel for theirs in known for key, numel in theirs.items()}

    def average(key: tuple[str, str]) -> Tensor:
        x = mine[key].clone() if key in mine else torch.zeros(sizes[key], device=reducer.device)
        return reducer.transport.all_reduce_mean_(x)

    means = reducer.call(lambda: {key: average(key) for key in sorted(sizes)})
    return {kind: {name: x for (of, name), x in means.items() if of == kind} for kind in sorted({k for k, _ in means})}


def _cut_by(reducer: Reducer) -> str:
    """What decides, with the density, which entries a rank averages."""
    return f"{reducer.compressor}, {reducer.communicator}"


def _generators(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
