"""Whether tensors hold NaN or inf."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

# sums over ranks and steps of anything larger would soon overflow float32
_LARGEST = 2.0**120


def peak_of(tensors: Sequence[Tensor]) -> float:
    """The largest magnitude, NaN if anything is: reads each tensor once, and the host waits for one answer."""
    dense = [(x.coalesce().values() if x.is_sparse else x) for x in tensors]
    dense = [torch.view_as_real(x) if x.is_complex() else x for x in dense if x.numel()]
    if not dense:
        return 0.0
    ends = torch.stack([end.float() for x in dense for end in torch.aminmax(x)])
    return float(torch.linalg.vector_norm(ends, ord=torch.inf))


def is_usable(peak: float) -> bool:
    """Whether what has this ``peak_of`` is finite, and may be added up: below 2 ** 120."""
    return peak < _LARGEST


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether `peak_of` tensors `is_usable`."""
    return is_usable(peak_of(tensors))


def gradients_are_finite(optimizer: Optimizer) -> bool:
    """``are_finite`` of what an optimizer is about to step with."""
    return are_finite([p.grad for entry in optimizer.param_groups for p in entry["params"] if p.grad is not None])
