"""convert: swaps layers of a model in place, and reports what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

log = logging.getLogger(__name__)

Swap = Callable[..., nn.Module]


class UnsuitableError(ValueError):
    """Raised by a swap that would rather leave the layer as it is; the message says why."""


@dataclass(frozen=True)
class Change:
    """What became of one layer.

    Args:
        name: within the model.
        before: the layer that was there.
        after: the one that is there now; the same one if it was kept.
        reason: why it was kept, or "".
    """

    name: str
    before: nn.Module
    after: nn.Module
    reason: str = ""

    @property
    def swapped(self) -> bool:
        """True where another layer has taken the place."""
        return self.after is not self.before


@dataclass(frozen=True)
class Report:
    """What `convert` did, in the order of the model's modules; `str` gives a line for each layer."""

    changes: tuple[Change, ...]

    @property
    def swapped(self) -> list[str]:
        """Names of the layers that were swapped."""
        return [change.name for change in self.changes if change.swapped]

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} of {len(self.changes)} layers swapped"]
        for change in self.changes:
            if change.swapped:
                counts = " -> ".join(f"{_parameters(layer):,}" for layer in (change.before, change.after))
                lines.append(f"{change.name}: {_kind(change.before)} -> {change.after}, parameters {counts}")
            else:
                lines.append(f"{change.name}: {_kind(change.before)} kept: {change.reason}")
        return "\n".join(lines)


def convert(
    model: nn.Module, swaps: Mapping[type[nn.Module], Swap], *, only: Callable[[str], bool] | None = None
) -> Report:
    """Swaps the layers of a model in place; optimizers made before hold the old parameters, so make them after.

    Layers are matched by their exact type, since a subclass may be used in another way than its base. A layer is kept
    if it has hooks or parametrizations, if it shares parameters with another one, if its parameters have hooks that the
    new one would not have, or if the swap raises `UnsuitableError`. One that stands at several places is swapped at all
    of them, whichever of them `only` names. Transformer layers whose linear layers are swapped leave torch's fused
    inference path, which reads their weights itself.

    Args:
        model: any module; not itself swapped.
        swaps: from the type of a layer to a function that makes the new one from the old, such as
            ``partial(BlockSparseLinear.from_linear, density=0.1)``.
        only: says of names whether to swap the layer; the others are not reported.

    Raises:
        ValueError: no layer of these types was found.

    Example:
        >>> from functools import partial
        >>> from lightning_sparse.nn import BlockSparseLinear
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        >>> swap = partial(BlockSparseLinear.from_linear, block=64, density=0.25)
        >>> convert(model, {nn.Linear: swap}, only=lambda name: name != "2").swapped
        ['0']
    """
    places: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}
    for parent, attribute, name in _children(model):
        layer = getattr(parent, attribute)
        if type(layer) in swaps:
            places.setdefault(layer, []).append((parent, attribute, name))
    if only is not None:
        places = {layer: found for layer, found in places.items() if any(only(name) for _, _, name in found)}
    if not places:
        raise ValueError(_nothing_found(model, swaps, only))
    owners = _owners(model)
    changes: list[Change] = []
    for layer, found in places.items():
        after, reason = layer, _obstacle(layer, owners)
        if not reason:
            try:
                after = swaps[type(layer)](layer)
            except UnsuitableError as error:
                reason = str(error)
            if _loses_hooks(layer, after):
                after, reason = layer, "its parameters have hooks, which would be lost"
        if after is not layer:
            for parent, attribute, _ in found:
                setattr(parent, attribute, after)
        changes.extend(Change(name, layer, after, reason) for _, _, name in found)
    report = Report(tuple(changes))
    if report.swapped:
        _leave_fused_paths(model, report.swapped)
    log.info("convert: %d of %d layers swapped", len(report.swapped), len(changes))
    return report


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(parent, attribute, name) of every place in the model, a shared module's places all of them."""
    for prefix, parent in model.named_modules(remove_duplicate=False):
        for attribute, child in parent._modules.items():
            if child is not None:
                yield parent, attribute, f"{prefix}.{attribute}" if prefix else attribute


def _owners(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(module)
    return owners


def _obstacle(layer: nn.Module, owners: dict[nn.Parameter, set[nn.Module]]) -> str:
    if parametrize.is_parametrized(layer):
        return "it is parametrized"
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
        layer._state_dict_hooks,
        layer._load_state_dict_pre_hooks,
    )
    if any(hooks):
        return "it has hooks, which would be lost"
    if any(len(owners[parameter]) > 1 for parameter in layer.parameters()):
        return "it shares a parameter with another layer"
    return ""


def _loses_hooks(layer: nn.Module, after: nn.Module) -> bool:
    kept = set(after.parameters())
    lost = (parameter for parameter in layer.parameters() if parameter not in kept)
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in lost)


def _nothing_found(model: nn.Module, swaps: Mapping[type[nn.Module], Swap], only: Callable[[str], bool] | None) -> str:
    kinds = ", ".join(kind.__name__ for kind in swaps)
    if type(model) in swaps:
        return f"convert: expected a model with a layer of type {kinds}, got the layer itself: call its swap on it"
    done = ", ".join(sorted({_kind(layer) for layer in model.modules() if isinstance(layer, tuple(swaps))}))
    hint = f"subclasses are not swapped, and there are {done}" if done else "check its layers"
    hint = "check `only`" if only is not None else hint
    return f"convert: expected a layer of type {kinds}, got none in {_kind(model)}: {hint}"


def _leave_fused_paths(model: nn.Module, swapped: list[str]) -> None:
    for prefix, module in model.named_modules():
        inside = any(name.startswith(f"{prefix}." if prefix else "") for name in swapped)
        if inside and isinstance(module, nn.TransformerEncoderLayer):
            # what torch asks before it takes the fused path
            module.activation_relu_or_gelu = 0
        if inside and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _parameters(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())
