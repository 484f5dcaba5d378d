"""SkipConv2d: a convolution that skips channels and samples which are zero throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse.nn.adopt import adopt
from lightning_sparse.nn.convert import UnsuitableError
from lightning_sparse.nn.precision import cast
from lightning_sparse.nn.products import ConvProducts
from lightning_sparse.nn.skipping import Skipping
from lightning_sparse.nn.work import Work


class SkipConv2d(nn.Conv2d):
    """`nn.Conv2d` with the same parameters and results, for inputs and gradients with zeros, such as ReLU makes.

    Channels and samples that are zero throughout are left out of each of the three products, where that was measured
    to be faster. With groups, other padding than zeros, or padding by name it is `nn.Conv2d`. Behind batch norm, whose
    backward pass fills gradients up, the forward pass and the gradient of the weight gain, that of the input does not.

    Args:
        relu_input, strict_nonfinite: as for `SkipLinear`.

    Attributes:
        work: multiply-adds of all passes.

    Source: as `SkipLinear`.

    Example:
        >>> layer = SkipConv2d(64, 32, 3, padding=1)
        >>> x = torch.randn(2, 64, 8, 8) * (torch.arange(64) < 5).view(64, 1, 1)
        >>> layer(x).shape
        torch.Size([2, 32, 8, 8])
    """

    def __init__(self, *args: Any, relu_input: bool = False, strict_nonfinite: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._skips = self.groups == 1 and self.padding_mode == "zeros" and not isinstance(self.padding, str)
        padding = (0, 0) if isinstance(self.padding, str) else _pair(self.padding)
        products = ConvProducts(_pair(self.stride), padding, _pair(self.dilation))
        self._skipping = Skipping("SkipConv2d", products, None, relu_input, strict_nonfinite)

    @classmethod
    def from_conv2d(cls, conv: nn.Conv2d, **options: Any) -> SkipConv2d:
        """The layer with the parameters of a dense one, the same objects; ``options`` are those of this class.

        Raises:
            UnsuitableError: groups or padding would leave it dense.
        """
        names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        form = {name: getattr(conv, name) for name in names}
        layer = cls(conv.in_channels, conv.out_channels, bias=conv.bias is not None, device="meta", **form, **options)
        if not layer._skips:
            raise UnsuitableError(f"groups must be 1 and padding of zeros, by number, got {conv}")
        return adopt(layer, conv)

    @property
    def work(self) -> Work:
        return self._skipping.work

    def forward(self, input: Tensor) -> Tensor:
        if not self._skips:
            return super().forward(input)
        if input.dim() == 3:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        if input.dim() != 4 or input.shape[1] != self.in_channels:
            raise ValueError(f"SkipConv2d: expected input [*, {self.in_channels}, h, w], got {list(input.shape)}")
        x, weight, *biases = cast("SkipConv2d", input, self.weight, *(() if self.bias is None else (self.bias,)))
        with torch.autocast(input.device.type, enabled=False):
            return self._skipping.apply(x, weight, biases[0] if biases else None)


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    return sizes[0], sizes[1]
