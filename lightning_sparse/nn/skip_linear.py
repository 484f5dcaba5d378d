"""SkipLinear: a linear layer that skips what zeros of its input and of its output's gradient would add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse.kernels.block_checks import check_block
from lightning_sparse.nn.adopt import adopt
from lightning_sparse.nn.precision import as_rows
from lightning_sparse.nn.products import LinearProducts
from lightning_sparse.nn.skipping import Skipping
from lightning_sparse.nn.work import Work


class SkipLinear(nn.Linear):
    """`nn.Linear` with the same parameters and results, for inputs and gradients with zeros, such as ReLU makes.

    Features and samples that are zero throughout are left out of a product, or tiles that are, whichever leaves out
    more. Products whose operands have nothing to skip, or where skipping was measured to be slower, run densely; what
    a sample of the rows shows to be dense is not looked at any further. The forward pass and the gradient of the weight
    gain from zeros of the input, both gradients from zeros of the output's gradient.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`.
        tile: side of the tiles that are skipped, one of 16, 32, 64 and 128; None leaves tiles alone.
        relu_input: the input comes straight from a ReLU, which sets to zero the gradient of every zero: no gradient is
            made there. The gradient of the input itself is wrong without one.
        strict_nonfinite: looks through the other operand, and runs densely where it is not finite, so that zeros times
            infinity make NaN; skipped products count as 0 otherwise.

    Attributes:
        work: multiply-adds of all passes.

    Source: Gong et al., "SparseTrain", https://arxiv.org/abs/1911.10175, whose vectors skip single zeros: here it is
    lines and tiles of them, which matrix products can leave out.

    Example:
        >>> layer = SkipLinear(512, 256)
        >>> x = torch.randn(128, 512) * (torch.arange(512) < 40)
        >>> torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5)
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        tile: int | None = 64,
        relu_input: bool = False,
        strict_nonfinite: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if tile is not None:
            check_block("SkipLinear", tile)
        self._skipping = Skipping("SkipLinear", LinearProducts(), tile, relu_input, strict_nonfinite)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> SkipLinear:
        """The layer with the parameters of a dense one, the same objects; ``options`` are those of this class."""
        bias = linear.bias is not None
        return adopt(cls(linear.in_features, linear.out_features, bias, "meta", **options), linear)

    @property
    def work(self) -> Work:
        return self._skipping.work

    def forward(self, input: Tensor) -> Tensor:
        x, weight, bias = as_rows("SkipLinear", input, self.in_features, self.weight, self.bias)
        with torch.autocast(input.device.type, enabled=False):
            out = self._skipping.apply(x, weight, bias)
        return out.reshape(*input.shape[:-1], self.out_features)
