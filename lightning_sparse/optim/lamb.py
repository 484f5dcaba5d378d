"""LAMB: Adam in which each layer's step has a length in proportion to its weights."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_sparse.kernels.adam import Adam
from lightning_sparse.kernels.lamb_norms import lamb_norms
from lightning_sparse.kernels.lamb_step import lamb_step_
from lightning_sparse.optim.layerwise import Layers, Layerwise, ratio_or_one
from lightning_sparse.optim.operators import PTO, Serial


class LAMB(Layerwise):
    """Layer-wise adaptive moments for batch training.

    With weights w, gradient g and moments m, v (zero at first) of one parameter at its step t, from 1::

        m = beta1 * m + (1 - beta1) * g ;  v = beta2 * v + (1 - beta2) * g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * trust * u ;  trust = clip(|w|) / |u|                  # 1 if |w| or |u| is zero

    Weight decay is a part of the update that the ratio scales, and is in its norm; the gradient is not clipped here.
    With a trust ratio of 1 everywhere this is ``torch.optim.AdamW``.

    The step is not linear in the gradient, so ``sparse_ddp`` treats it as adaptive. On CUDA each step is one read of
    weights, gradients and moments and one fused pass, in Triton kernels; elsewhere foreach operations. Both give the
    same up to the rounding of norms. Norms and moments are float32 for half-precision parameters too.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2,
    https://arxiv.org/abs/1904.00962.

    Args:
        params: parameters or groups; every option below can be given by group.
        lr: learning rate, at least 0.
        betas: each in [0, 1).
        eps: at least 0.
        weight_decay: at least 0.
        bias_correction: divide the moments by ``1 - beta^t``; some implementations do not.
        norm_bounds: what |w| is clipped to in the ratio (phi of the paper).
        min_ndim: parameters of fewer dimensions (biases, norms) have trust ratio 1 and no weight decay; 0 excludes
            none.
        operator: who computes the norms; None takes ``Serial()``. Not by group.
        fused: False takes foreach operations on CUDA too. Not by group.

    Raises:
        ValueError, TypeError: on options out of range and on parameters of another type.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = LAMB(layer.parameters(), lr=1e-3, weight_decay=0.01)
        >>> layer(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
    """

    _BUFFERS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        norm_bounds: tuple[float, float] = (0.0, math.inf),
        min_ndim: int = 2,
        operator: Serial | PTO | None = None,
        fused: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "norm_bounds": norm_bounds,
            "min_ndim": min_ndim,
        }
        super().__init__(params, defaults, operator, fused)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"LAMB: betas must be two numbers in [0, 1), got {group['betas']!r}")
        if not group["eps"] >= 0:
            raise ValueError(f"LAMB: eps must be at least 0, got {group['eps']!r}")
        low, high = group["norm_bounds"]
        if not 0 <= low <= high:
            raise ValueError(f"LAMB: norm_bounds must be ascending and at least 0, got {group['norm_bounds']!r}")

    def _trust(self, layers: Layers) -> Tensor:
        state = layers.state
        of_weights, of_updates = lamb_norms(
            layers.weights,
            layers.gradients,
            state["exp_avg"],
            state["exp_avg_sq"],
            _adam(layers),
            fused=self._fused,
        )
        ratio = of_weights.clamp(*layers.options["norm_bounds"]) / of_updates
        return ratio_or_one(of_weights, of_updates, ratio)

    def _move(self, layers: Layers, trust: Tensor) -> None:
        lamb_step_(
            layers.weights,
            layers.gradients,
            layers.state["exp_avg"],
            layers.state["exp_avg_sq"],
            trust * float(layers.options["lr"]),
            _adam(layers),
            fused=self._fused,
        )


def _adam(layers: Layers) -> Adam:
    beta1, beta2 = layers.options["betas"]
    first, second = 1.0, 1.0
    if layers.options["bias_correction"]:
        first, second = (1 / (1 - beta**layers.step) for beta in (beta1, beta2))
    return Adam(beta1, beta2, first, second, layers.options["eps"], layers.decay)
