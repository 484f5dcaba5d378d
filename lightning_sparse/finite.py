"""Whether tensors hold NaN or inf."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Reads each tensor once, and the host waits for one answer. Sums that overflow float32 count as not finite."""
    if not tensors:
        return True
    sums = [(x.coalesce().values() if x.is_sparse else x).sum(dtype=torch.float32) for x in tensors]
    return bool(torch.isfinite(torch.stack(sums)).all())


def gradients_are_finite(optimizer: Optimizer) -> bool:
    """``are_finite`` of what an optimizer is about to step with."""
    return are_finite([p.grad for entry in optimizer.param_groups for p in entry["params"] if p.grad is not None])
