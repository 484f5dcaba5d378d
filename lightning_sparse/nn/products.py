"""The three products of a layer, alike for a linear one and for a convolution: [m, i, ...], [o, i, ...], [m, o, ...]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Products(Protocol):
    """What a layer multiplies; first dimensions are samples or output features, second ones features."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """[m, o, ...], without the bias."""

    def grad_input(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """[m, i, ...]; of ``x`` only the sizes behind its features count."""

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """[o, i, ...]; of ``weight`` only the sizes behind its features count."""

    def macs(self, x: Tensor, weight: Tensor) -> int:
        """Multiply-adds of each of the three for one sample, one input and one output feature."""


@dataclass(frozen=True)
class LinearProducts:
    """Those of `nn.Linear`, on matrices."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    def grad_input(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return grad @ weight

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad.t() @ x

    def macs(self, x: Tensor, weight: Tensor) -> int:
        return 1


@dataclass(frozen=True)
class ConvProducts:
    """Those of `nn.Conv2d` with one group and zero padding."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, None, self.stride, self.padding, self.dilation)

    def grad_input(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        x = x.new_empty(1).expand(len(grad), weight.shape[1], *x.shape[2:])
        return self._backward(grad, x, weight, (True, False, False))[0]

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.new_empty(1).expand(grad.shape[1], x.shape[1], *weight.shape[2:])
        return self._backward(grad, x, weight, (False, True, False))[1]

    def macs(self, x: Tensor, weight: Tensor) -> int:
        return math.prod(weight.shape[2:]) * math.prod(self.out_size(x, weight))

    def out_size(self, x: Tensor, weight: Tensor) -> list[int]:
        """Height and width of the output."""
        sizes = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        return [(size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, dilation in sizes]

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, ...]) -> tuple[Tensor, ...]:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, self.stride, self.padding, self.dilation, False, [0, 0], 1, list(mask)
        )
