"""What a checkpoint's state must be like before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_sparse.finite import are_finite
from lightning_sparse.nested import mapped, tensors
from lightning_sparse.protocols import Tap

KEY = "sparse_ddp"
KINDS = ("exact", "mean", "none")
VERSION = 2


class RefusedError(Exception):
    """Every rank finds the same fault in the file."""


def shapes(state: Any) -> Any:
    """What there is, without its values."""
    return mapped(state, lambda x: [str(x.dtype), *x.shape], lambda x: type(x).__name__)


def check(state: Any, tap: Tap, module: nn.Module) -> None:
    """Refuse what is not ours, not whole, or of another model."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION or state.get("kind") not in KINDS:
        raise RefusedError(
            f"sparse_ddp: expected a checkpoint's state of version {VERSION}, got {_describe(state)}:"
            " it was written by another version, or is damaged"
        )
    parts = {"exact": ("ranks",), "mean": ("owed", "layout"), "none": ()}[state["kind"]]
    _check_keys(state, ("exchange", "shared", "cut", "cut_by", *parts))
    if state["exchange"] != tap.name and state["kind"] != "none":
        raise RefusedError(
            f"sparse_ddp: expected a checkpoint of the {tap.name} exchange, got one of {state['exchange']}: pass"
            f" exchange={state['exchange'].capitalize()}(), or delete checkpoint[{KEY!r}] to begin with nothing owed"
        )
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    for group in state["shared"].get("groups", ()) if state["exchange"] == tap.name else ():
        _check_keys(group, ("anchor", "outer"))
        _check_names({kind: group[kind] for kind in ("anchor", "outer")}, {}, sizes)
    if state["kind"] == "mean":
        _check_names(state["owed"], state["layout"], sizes)
    for rank in state["ranks"] if state["kind"] == "exact" else ():
        _check_keys(rank, ("own", "layout", "optimizers", "shapes", "generators"))
        _check_names(rank["own"], rank["layout"], sizes)
        if shapes(rank["optimizers"]) != rank["shapes"]:
            raise RefusedError(
                "sparse_ddp: expected every rank's optimizer states in the checkpoint, got others: damaged"
            )
        if any(bool(x.isnan().any()) for x in tensors(rank["optimizers"]) if x.is_floating_point()):
            raise RefusedError("sparse_ddp: expected optimizer states without NaN in the checkpoint, got some: damaged")


def _check_keys(state: Any, keys: Sequence[str]) -> None:
    for key in keys:
        if not isinstance(state, Mapping) or key not in state:
            raise RefusedError(
                f"sparse_ddp: expected {key!r} in the checkpoint's state, got {_describe(state)}: damaged"
            )


def layout_of(owed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[str]]:
    """Which names there are of each kind, so that what is lost is missed."""
    return {kind: sorted(parts) for kind, parts in owed.items()}


def _check_names(kinds: Any, layout: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> None:
    _check_keys(kinds, list(layout))
    for kind, names in layout.items():
        for name in names:
            if name not in kinds[kind]:
                raise RefusedError(
                    f"sparse_ddp: expected {kind} of parameter {name!r} in the checkpoint's state, got none: damaged"
                )
    for kind, parts in kinds.items():
        for name, x in parts.items():
            is_like = isinstance(x, Tensor) and x.is_floating_point() and x.numel() == sizes.get(name)
            if not is_like:
                got = f"{x.numel()} elements of {x.dtype}" if isinstance(x, Tensor) else _describe(x)
                raise RefusedError(
                    f"sparse_ddp: expected {sizes.get(name, 'no')} elements of {kind} for parameter {name!r},"
                    f" got {got}: the checkpoint belongs to another model"
                )
            if not are_finite([x]):
                raise RefusedError(
                    f"sparse_ddp: expected finite {kind} of parameter {name!r} in the checkpoint's state, got NaN or"
                    " inf: damaged"
                )


def _describe(state: Any) -> str:
    return f"{type(state).__name__} {list(state) if isinstance(state, Mapping) else state!r}"
