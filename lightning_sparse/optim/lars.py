"""LARS: SGD with momentum in which each layer's step has a length in proportion to its weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_sparse.kernels.lars_step import lars_step_
from lightning_sparse.kernels.norms import norms
from lightning_sparse.optim.layerwise import Layers, Layerwise, ratio_or_one
from lightning_sparse.optim.operators import PTO, Serial


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling.

    With weights w, gradient g and velocity v (zero at first) of one parameter::

        trust = trust_coefficient * |w| / (|g| + weight_decay * |w|)   # 1 if |w| or |g| is zero
        v = momentum * v + trust * (g + weight_decay * w)
        w = w - lr * v            # nesterov: w - lr * (trust * (g + weight_decay * w) + momentum * v)

    Weight decay stands in the ratio and in the step; the learning rate is outside of the velocity, as in
    ``torch.optim.SGD``, so that a change of it acts at once. In the paper the velocity holds ``lr * trust * (...)``;
    both are the same while the learning rate is constant. With a trust ratio of 1 everywhere this is
    ``torch.optim.SGD(momentum=...)``.

    The step is not linear in the gradient, so ``sparse_ddp`` treats it as adaptive. On CUDA each step is one read of
    weights and gradients and one fused pass, in Triton kernels; elsewhere foreach operations. Both give the same up to
    the rounding of norms. Norms and the velocity are float32 for half-precision parameters too.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", Algorithm 1,
    https://arxiv.org/abs/1708.03888.

    Args:
        params: parameters or groups; every option below can be given by group.
        lr: learning rate, at least 0.
        momentum: in [0, 1).
        weight_decay: at least 0.
        trust_coefficient: above 0; eta of the paper.
        nesterov: the second form of the step.
        min_ndim: parameters of fewer dimensions (biases, norms) have trust ratio 1 and no weight decay; 0 excludes
            none.
        operator: who computes the norms; None takes ``Serial()``. Not by group.
        fused: False takes foreach operations on CUDA too. Not by group.

    Raises:
        ValueError, TypeError: on options out of range and on parameters of another type.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = LARS(layer.parameters(), lr=1.0, weight_decay=1e-4)
        >>> layer(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
    """

    _BUFFERS = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        min_ndim: int = 2,
        operator: Serial | PTO | None = None,
        fused: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "min_ndim": min_ndim,
        }
        super().__init__(params, defaults, operator, fused)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"LARS: momentum must be in [0, 1), got {group['momentum']!r}")
        if not group["trust_coefficient"] > 0:
            raise ValueError(f"LARS: trust_coefficient must be above 0, got {group['trust_coefficient']!r}")

    def _trust(self, layers: Layers) -> Tensor:
        of_both = norms([*layers.weights, *layers.gradients], fused=self._fused)
        of_weights, of_gradients = of_both.split(len(layers.weights))
        below = of_gradients + layers.decay * of_weights
        ratio = layers.options["trust_coefficient"] * of_weights / below
        return ratio_or_one(of_weights, of_gradients, ratio)

    def _move(self, layers: Layers, trust: Tensor) -> None:
        options = layers.options
        lars_step_(
            layers.weights,
            layers.gradients,
            layers.state["momentum_buffer"],
            trust,
            float(options["lr"]),
            layers.decay,
            options["momentum"],
            options["nesterov"],
            fused=self._fused,
        )
