"""torch's own kernels for 2:4 sparse weights: which shapes they take, and the product."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
# multiples that both of torch's backends take, cuSPARSELt and CUTLASS, for half types
OUT_MULTIPLE, IN_MULTIPLE = 32, 64


def misfit(x: Tensor, out_features: int, n: int, m: int) -> str | None:
    """Why the kernels cannot multiply x [rows, in_features] with a weight, or None if they can."""
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda and torch.version.hip is None else (0, 0)
    return misfit_of(capability, x.dtype, x.shape[0], out_features, x.shape[1], n, m)


def misfit_of(
    capability: tuple[int, int], dtype: torch.dtype, rows: int, out_features: int, in_features: int, n: int, m: int
) -> str | None:
    """As `misfit`, of numbers; a device that is no NVIDIA GPU has capability (0, 0)."""
    if (n, m) != (2, 4):
        return f"pattern {n}:{m} is not 2:4"
    if capability < (8, 0):
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    if dtype not in DTYPES:
        return f"{dtype} is neither float16 nor bfloat16"
    if out_features % OUT_MULTIPLE or in_features % IN_MULTIPLE:
        return f"{out_features} x {in_features} is no multiple of {OUT_MULTIPLE} x {IN_MULTIPLE}"
    return None if rows else "no rows"


def semi_structured_linear(x: Tensor, pruned: Tensor, bias: Tensor | None) -> Tensor:
    """x @ pruned.T + bias for a weight of which two of four are zero; packs the weight in every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*SparseSemiStructuredTensor is in prototype stage.*")
        packed = torch.sparse.to_sparse_semi_structured(pruned.detach().contiguous())
    return F.linear(x.detach(), packed, bias if bias is None else bias.detach())
