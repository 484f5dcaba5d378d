"""The three products of a layer, alike for a linear one and for a convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Products(Protocol):
    """What a layer multiplies: samples [m, i, ...], weights [o, i, ...] and gradients [m, o, ...]."""

    tiled: ClassVar[bool]
    """Whether operands are matrices, which can be cut into tiles."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[m, o, ...]."""

    def grad_input(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """[m, i, ...]; of ``x`` only the sizes behind its features count."""

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """[o, i, ...]; of ``weight`` only the sizes behind its features count."""

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> Gradients:
        """Those of x, weight and bias that are needed, at once."""

    def out_size(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """The sizes of the output behind its features."""

    def options(self) -> tuple[int, ...]:
        """What the time depends on beside the sizes of operands."""


@dataclass(frozen=True)
class LinearProducts:
    """Those of `nn.Linear`, on matrices."""

    tiled: ClassVar[bool] = True

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def grad_input(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return grad @ weight

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad.t() @ x

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> Gradients:
        dx = self.grad_input(grad, weight, x) if needs[0] else None
        return dx, self.grad_weight(grad, x, weight) if needs[1] else None, grad.sum(0) if needs[2] else None

    def out_size(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        return ()

    def options(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class ConvProducts:
    """Those of `nn.Conv2d` with one group and zero padding."""

    tiled: ClassVar[bool] = False
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)

    def grad_input(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        x = x.new_empty(1).expand(len(grad), weight.shape[1], *x.shape[2:])
        return self._backward(grad, x, weight, (True, False, False))[0]

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.new_empty(1).expand(grad.shape[1], x.shape[1], *weight.shape[2:])
        return self._backward(grad, x, weight, (False, True, False))[1]

    def out_size(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        sizes = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * pad - gap * (k - 1) - 1) // step + 1 for n, k, step, pad, gap in sizes)

    def options(self) -> tuple[int, ...]:
        return (*self.stride, *self.padding, *self.dilation)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> Gradients:
        return self._backward(grad, x, weight, needs)

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> Any:
        bias = [weight.shape[0]] if needs[2] else None
        return torch.ops.aten.convolution_backward(
            grad, x, weight, bias, self.stride, self.padding, self.dilation, False, [0, 0], 1, list(needs)
        )


def macs(products: Products, x: Tensor, weight: Tensor) -> int:
    """Multiply-adds of each product for one sample, one input feature and one output feature."""
    return math.prod(weight.shape[2:]) * math.prod(products.out_size(x, weight))
