"""Whether tensors hold NaN or inf."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Reads each tensor once, and the host waits for one answer. Sums that overflow float32 count as not finite."""
    if not tensors:
        return True
    sums = [(x.coalesce().values() if x.is_sparse else x).sum(dtype=torch.float32) for x in tensors]
    return bool(torch.isfinite(torch.stack(sums)).all())
