"""The dtype that arithmetic takes place in."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(
    owner: str, x: Tensor, in_features: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[*, in_features] as [rows, in_features], weight and bias, in autocast's dtype where it is on."""
    if x.shape[-1:] != (in_features,):
        raise ValueError(f"{owner}: expected input [*, {in_features}], got {list(x.shape)}")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    return x.reshape(-1, in_features), weight, bias


def working_dtype(x: Tensor) -> torch.dtype:
    """That of autocast on the tensor's device, where it is on, else the tensor's own."""
    if not x.is_floating_point():
        raise TypeError(f"expected a floating-point input, got {x.dtype}: convert it first")
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
