"""Layers: how many entries of each parameter were sent, and their density over many looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sparse.job import Picked


@dataclass(frozen=True)
class Layer:
    """What one exchange sent of one parameter.

    Args:
        entries: that were sent, padding of the payload not counted.
        numel: elements of the parameter.
        is_dense: it is averaged densely whatever the density.
    """

    entries: int
    numel: int
    is_dense: bool = False


def count_layers(exchanges: Iterable[Picked]) -> dict[str, Layer]:
    """Entries sent by parameter name; the newest exchange of a parameter counts. Reads k indices on the host.

    What was refused because it was not finite is left out.
    """
    layers: dict[str, Layer] = {}
    for picked in sorted(exchanges, key=lambda picked: picked.job.step):
        if not picked.finite:
            continue
        job = picked.job
        sizes = [x.numel() for x in job.inputs]
        for name, entries, numel in zip(job.names, _entries(picked, sizes), sizes, strict=True):
            layers[name] = Layer(entries, numel)
        for name, x in zip(job.dense_names, job.dense_inputs, strict=True):
            layers[name] = Layer(x.numel(), x.numel(), is_dense=True)
    return layers


def density(layers: Iterable[Layer]) -> float:
    """Entries sent over elements, what is averaged densely included; NaN for no layers."""
    entries, numel = 0, 0
    for layer in layers:
        entries, numel = entries + layer.entries, numel + layer.numel
    return entries / numel if numel else float("nan")


def _entries(picked: Picked, sizes: list[int]) -> list[int]:
    sent = picked.sent
    if sent is None:
        return sizes
    # entries are in ascending order; a codec may have rounded some of them to the padding's zero
    indices = sent.indices[sent.values != 0].long()  # [k]
    bounds = torch.tensor([0, *sizes], device=indices.device).cumsum(0)  # [p + 1]
    return torch.searchsorted(indices, bounds).diff().tolist()


class LayerDensity(Metric):
    """Entries sent over elements, summed over looks: [p] float64 in the order of ``names``, NaN where none was seen.

    Args:
        names: of the parameters.

    Example:
        >>> metric = LayerDensity(["a", "b"])
        >>> metric.update({"a": Layer(1, 4)})
        >>> metric.update({"a": Layer(3, 4)})
        >>> metric.compute().tolist()
        [0.5, nan]
    """

    full_state_update = False
    entries: Tensor
    numel: Tensor

    def __init__(self, names: Iterable[str]) -> None:
        # the figures of one rank: a report must not make ranks meet
        super().__init__(sync_on_compute=False)
        self.names = list(names)
        for state in ("entries", "numel"):
            self.add_state(state, torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, layers: Mapping[str, Layer]) -> None:
        none = Layer(0, 0)
        self.entries += torch.tensor([layers.get(name, none).entries for name in self.names]).double()
        self.numel += torch.tensor([layers.get(name, none).numel for name in self.names]).double()

    def compute(self) -> Tensor:
        return self.entries / self.numel
