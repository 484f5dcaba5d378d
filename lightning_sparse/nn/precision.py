"""The dtype that arithmetic takes place in."""

from __future__ import annotations

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    """That of autocast on the tensor's device, where it is on, else the tensor's own."""
    if not x.is_floating_point():
        raise TypeError(f"expected a floating-point input, got {x.dtype}: convert it first")
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
