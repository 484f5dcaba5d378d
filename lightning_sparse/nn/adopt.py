"""adopt: a layer takes the parameters of the one whose place it takes."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

_Layer = TypeVar("_Layer", bound=nn.Module)


def adopt(layer: _Layer, old: nn.Module) -> _Layer:
    """Makes the parameters of ``old`` those of ``layer``, the objects themselves, and sets its mode; returns it."""
    for name, parameter in old.named_parameters(recurse=False):
        setattr(layer, name, parameter)
    return layer.train(old.training)
