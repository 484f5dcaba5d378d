"""Layerwise: what optimizers have in common that scale the step of each layer by a trust ratio of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.optim.operators import PTO, Serial
from lightning_sparse.sync.flat import flat_view


@dataclass(frozen=True)
class Layers:
    """Parameters of one group that are stepped in one launch: flat views [n] of each, and what they share.

    Args:
        options: the parameter group.
        adapt: whether they have trust ratios and weight decay.
        step: of these parameters, from 1.
        state: buffers of each kind, one a parameter: [n] float32.
    """

    options: dict[str, Any]
    adapt: bool
    step: int
    weights: list[Tensor]
    gradients: list[Tensor]
    state: dict[str, list[Tensor]]

    @property
    def decay(self) -> float:
        """The weight decay of these parameters."""
        return float(self.options["weight_decay"]) if self.adapt else 0.0

    def at(self, positions: Sequence[int]) -> Layers:
        """Some of them."""
        pick: Callable[[list[Tensor]], list[Tensor]] = lambda pieces: [pieces[i] for i in positions]  # noqa: E731
        state = {kind: pick(buffers) for kind, buffers in self.state.items()}
        return Layers(self.options, self.adapt, self.step, pick(self.weights), pick(self.gradients), state)


class Layerwise(Optimizer):
    """Collects parameters into ``Layers``, has their trust ratios computed, and steps them.

    State is float32 whatever the parameters are, also after ``load_state_dict``.
    """

    _BUFFERS: tuple[str, ...]

    def __init__(self, params: Any, defaults: dict[str, Any], operator: Serial | PTO | None, fused: bool) -> None:
        self.operator = Serial() if operator is None else operator
        self._fused = fused
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checked as those of the constructor are."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without gradient are passed over.

        Args:
            closure: evaluates the loss again, and makes gradients.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layers = [x for group in self.param_groups for x in self._collect(group)]
        adapted = [x for x in layers if x.adapt]
        ratios = self._ratios(adapted)
        for x in layers:
            self._move(x, ratios.pop(0) if x.adapt else torch.ones(len(x.weights), device=x.weights[0].device))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and state; buffers stay float32, where torch would round them to the parameter's type."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for kind in self._BUFFERS:
                if kind in (saved := state_dict["state"].get(key, {})):
                    buffer = torch.empty_like(parameter, dtype=torch.float32)
                    self.state[parameter][kind] = buffer.copy_(saved[kind])

    def __getstate__(self) -> dict[str, Any]:
        # what torch copies, and what is not given by group
        return {**super().__getstate__(), "operator": self.operator, "_fused": self._fused}

    def _check(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        for key in ("lr", "weight_decay"):
            if not float(group[key]) >= 0:
                raise ValueError(f"{name}: {key} must be at least 0, got {group[key]!r}")
        if isinstance(group["min_ndim"], bool) or not isinstance(group["min_ndim"], int) or group["min_ndim"] < 0:
            raise ValueError(f"{name}: min_ndim must be an integer of at least 0, got {group['min_ndim']!r}")
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise TypeError(f"{name}: parameters must be float32, bfloat16 or float16, got {parameter.dtype}")

    def _collect(self, group: dict[str, Any]) -> list[Layers]:
        """The parameters that have a gradient, by device, exclusion and step."""
        found: dict[tuple[torch.device, bool, int], Layers] = {}
        for parameter in group["params"]:
            if parameter.grad is None or not parameter.numel():
                continue
            state = self.state[parameter]
            for kind in self._BUFFERS:
                if kind not in state:
                    state[kind] = torch.zeros_like(parameter, dtype=torch.float32)
                elif state[kind].stride() != parameter.stride():
                    # the memory format has changed since
                    state[kind] = torch.empty_like(parameter, dtype=torch.float32).copy_(state[kind])
            state["step"] = int(state.get("step", 0)) + 1
            key = (parameter.device, parameter.ndim >= group["min_ndim"], state["step"])
            if key not in found:
                found[key] = Layers(group, key[1], key[2], [], [], {kind: [] for kind in self._BUFFERS})
            found[key].weights.append(flat_view(parameter))
            found[key].gradients.append(flat_view(_like(parameter, parameter.grad)))
            for kind in self._BUFFERS:
                found[key].state[kind].append(flat_view(state[kind]))
        return list(found.values())

    def _ratios(self, layers: list[Layers]) -> list[Tensor]:
        """The trust ratios of each: [parameters] float32."""
        if not layers:
            return []
        owners = [(i, j) for i, x in enumerate(layers) for j in range(len(x.weights))]
        home = layers[0].weights[0].device

        def compute(positions: Sequence[int]) -> Tensor:
            parts = []
            for i, x in enumerate(layers):
                mine = [j for owner, j in (owners[at] for at in positions) if owner == i]
                if mine:
                    parts.append(self._trust(x.at(mine)).to(home))
            return torch.cat(parts) if parts else torch.zeros(0, device=home)

        numels = [layers[i].weights[j].numel() for i, j in owners]
        ratios = self.operator(numels, compute).split([len(x.weights) for x in layers])
        return [part.to(x.weights[0].device) for part, x in zip(ratios, layers, strict=True)]

    def _trust(self, layers: Layers) -> Tensor:
        """The trust ratio of each parameter, [parameters] float32; reads, and changes nothing."""
        raise NotImplementedError

    def _move(self, layers: Layers, trust: Tensor) -> None:
        """Step the parameters, in place."""
        raise NotImplementedError


def ratio_or_one(weights: Tensor, updates: Tensor, ratio: Tensor) -> Tensor:
    """The ratio where both norms are above zero, and 1 elsewhere: [parameters] float32."""
    return torch.where((weights > 0) & (updates > 0), ratio, 1.0)


def _like(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The gradient with its elements in the order that the parameter's have in memory."""
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"layer-wise optimizers need dense gradients, got {gradient.layout} of shape {tuple(gradient.shape)}:"
            " build the embedding with sparse=False"
        )
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
