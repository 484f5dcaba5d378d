"""NM: a linear layer that computes with the n largest of every m consecutive weights."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sparse.kernels.nm_prune import check_nm, nm_prune
from lightning_sparse.nn.adopt import adopt
from lightning_sparse.nn.crossover import NEVER, Case, Crossover, Run, crossover, rounded_up
from lightning_sparse.nn.eager import eager
from lightning_sparse.nn.first_order import first_order
from lightning_sparse.nn.precision import as_rows
from lightning_sparse.nn.semi_structured import misfit, semi_structured_linear
from lightning_sparse.nn.work import Work

log = logging.getLogger(__name__)

_MEASURED_ROWS = 8192
_failed: set[Case] = set()


class NM(nn.Linear):
    """`nn.Linear` that computes with the n largest magnitudes of every m consecutive weights of an output (N:M).

    The parameter stays dense, and what is kept is chosen anew in every forward, so that training may revive weights.
    2:4 in half precision on a GPU runs on torch's semi-structured kernels where they take the shape and are faster,
    which is measured once; everything else multiplies with the masked weight, at the cost of a dense layer and of the
    choice: on the CPU the layer is slower than a dense one.

    Without `decay`, gradients are those of the masked layer: dead weights have none. With it the gradient passes
    straight through to dead weights too, and draws them towards zero (SR-STE). That term is part of the gradient which
    ranks exchange; where they compress it, take decay=0 and call `add_decay_` before the optimizer's step.

    Args:
        in_features: as of `nn.Linear`; a last group of fewer than m weights keeps n too.
        out_features: as of `nn.Linear`.
        bias: as of `nn.Linear`.
        n: weights kept of each group.
        m: size of a group: 2, 4, 8 or 16.
        decay: lambda of SR-STE, 2e-4 in the paper, or None.

    Attributes:
        work: multiply-adds done and skipped; only the semi-structured kernels skip any.

    Raises:
        ValueError: n, m or decay does not fit.

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch",
    https://arxiv.org/abs/2102.04010, equation 9.

    Example:
        >>> layer = NM(8, 3)
        >>> (layer.masked_weight() != 0).sum(1).tolist()
        [4, 4, 4]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        n: int = 2,
        m: int = 4,
        decay: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_nm("NM", n, m)
        if decay is not None and decay < 0:
            raise ValueError(f"NM: decay must be at least 0, or None, got {decay}")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.n, self.m, self.decay = n, m, decay
        self.work = Work()

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, n: int = 2, m: int = 4, decay: float | None = None) -> NM:
        """The layer that shares the parameters of a dense one."""
        out_features, in_features = linear.weight.shape
        return adopt(
            cls(in_features, out_features, linear.bias is not None, n=n, m=m, decay=decay, device="meta"), linear
        )

    def masked_weight(self) -> Tensor:
        """[out_features, in_features]: the weight that the layer computes with."""
        return nm_prune(self.weight, self.n, self.m)[0]

    @torch.no_grad()
    def add_decay_(self, decay: float) -> None:
        """Adds decay * weight to the gradient of dead weights, in place; does nothing without a gradient."""
        if self.weight.grad is not None:
            mask = nm_prune(self.weight, self.n, self.m)[1]
            self.weight.grad.add_(self.weight.masked_fill(mask, 0.0), alpha=decay)

    def forward(self, x: Tensor) -> Tensor:
        """[*, in_features] to [*, out_features]."""
        rows, weight, bias = as_rows("NM", x, self.in_features, self.weight, self.bias)
        return self._product(rows, weight, bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n={self.n}, m={self.m}, decay={self.decay}"

    @eager
    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pruned, mask = nm_prune(weight, self.n, self.m)
        sparse = misfit(x, self.out_features, self.n, self.m) is None and self._crossover(x).density > 0
        return _Product.apply(x, weight, bias, pruned, mask, self.decay, sparse, self.work)

    def _crossover(self, x: Tensor) -> Crossover:
        rows = min(rounded_up(x.shape[0]), _MEASURED_ROWS)
        case = Case.of("NM", x, rows, self.out_features, self.in_features)
        if case in _failed:
            return NEVER

        def operands() -> tuple[Tensor, Tensor]:
            weight = x.new_zeros(self.out_features, self.in_features)
            weight.view(-1, 4)[:, :2] = 1.0
            return x.new_ones(rows, self.in_features), weight

        def dense() -> Run:
            inputs, weight = operands()
            return lambda: F.linear(inputs, weight)

        def sparse(density: float) -> Run:
            inputs, weight = operands()
            return lambda: semi_structured_linear(inputs, weight, None)

        try:
            return crossover(case, dense, sparse, densities=(0.5,))
        except (RuntimeError, NotImplementedError) as error:
            _failed.add(case)
            log.warning("NM: torch's semi-structured kernels refused %s, which runs masked: %s", case.shape, error)
            return NEVER


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pruned: Tensor,
        mask: Tensor,
        decay: float | None,
        sparse: bool,
        work: Work,
    ) -> Tensor:
        ctx.decay, ctx.work = decay, work
        # dead weights are needed for their decay only
        ctx.save_for_backward(x, pruned, mask, weight if decay else None)
        # semi-structured kernels multiply two of four
        work.forward.add(x.shape[0], weight.numel() // 2 if sparse else weight.numel(), weight.numel())
        return semi_structured_linear(x, pruned, bias) if sparse else F.linear(x, pruned, bias)

    @staticmethod
    @first_order("NM", "nn.Linear")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pruned, mask, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        if needs_x:
            ctx.work.input_gradient.add(x.shape[0], pruned.numel(), pruned.numel())
            grad_x = grad @ pruned
        if needs_weight:
            ctx.work.weight_gradient.add(x.shape[0], pruned.numel(), pruned.numel())
            grad_weight = grad.t() @ x
            if ctx.decay is None:
                grad_weight.mul_(mask)
            elif ctx.decay:
                grad_weight.add_(weight.masked_fill(mask, 0.0), alpha=ctx.decay)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None, None, None, None, None
