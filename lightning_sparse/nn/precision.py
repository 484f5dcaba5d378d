"""The dtype that arithmetic takes place in."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(
    owner: str, x: Tensor, in_features: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[*, in_features] as [rows, in_features], weight and bias, `cast`."""
    if x.shape[-1:] != (in_features,):
        raise ValueError(f"{owner}: expected input [*, {in_features}], got {list(x.shape)}")
    x, weight, *biases = cast(owner, x, weight, *(() if bias is None else (bias,)))
    return x.reshape(-1, in_features), weight, biases[0] if biases else None


def cast(owner: str, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """All of them in autocast's dtype, where it is on; float64 stays, as it does in torch's own products.

    Raises:
        TypeError: dtypes differ.
    """
    operands = (x, *others)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        operands = tuple(y if y.dtype == torch.float64 or not y.is_floating_point() else y.to(dtype) for y in operands)
    for other in operands[1:]:
        if other.dtype != operands[0].dtype:
            raise TypeError(
                f"{owner}: expected input and parameters of one dtype, got {x.dtype} and {other.dtype}: convert one"
            )
    return operands
