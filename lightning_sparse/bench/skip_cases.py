"""What `bench layers` times of `SkipLinear` and `SkipConv2d`: inputs and gradients with zeros in several patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lightning_sparse.bench.layer_cases import Contest, LayerCase
from lightning_sparse.nn.skip_conv2d import SkipConv2d
from lightning_sparse.nn.skip_linear import SkipLinear

Pattern = Callable[[Tensor], Tensor]
TILE = 64


def skip_layers(device: torch.device, quick: bool) -> Iterator[LayerCase]:
    """What is live of the input and of the gradient of the output; the last two show the price of asking."""
    patterns: dict[str, Pattern] = {
        "10 % of features live": partial(_every_tenth, dim=1),
        "10 % of samples live": partial(_every_tenth, dim=0),
        "half of single entries live": lambda x: x.relu(),
        "nothing zero": lambda x: x,
    }
    for name, pattern in patterns.items():
        yield LayerCase("SkipLinear", f"2048x2048, 512 rows, {name}", partial(_linear, pattern, device))
        if not quick:
            named = name.replace("features", "channels")
            yield LayerCase("SkipConv2d", f"64 to 64, 3x3, 32 x 32 x 32, {named}", partial(_conv, pattern, device))
    yield LayerCase(
        "SkipLinear", "2048x2048, 512 rows, 12 % of tiles live", partial(_linear, _every_eighth_tile, device)
    )


def _linear(pattern: Pattern, device: torch.device) -> Contest:
    return _contest(SkipLinear(2048, 2048, device=device), nn.Linear(2048, 2048, device=device), pattern, (512, 2048))


def _conv(pattern: Pattern, device: torch.device) -> Contest:
    dense = nn.Conv2d(64, 64, 3, padding=1, device=device)
    return _contest(SkipConv2d.from_conv2d(dense), dense, pattern, (32, 64, 32, 32))


def _contest(layer: nn.Module, dense: nn.Module, pattern: Pattern, shape: tuple[int, ...]) -> Contest:
    dense.load_state_dict(layer.state_dict())
    generator = torch.Generator().manual_seed(0)
    device = next(layer.parameters()).device
    x = pattern(torch.randn(shape, generator=generator)).to(device)
    grad = pattern(torch.randn(dense(x).shape, generator=generator)).to(device)
    results: dict[nn.Module, tuple[Tensor, ...]] = {}

    def run(module: nn.Module) -> None:
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        results[module] = (out, *torch.autograd.grad(out, [leaf, *module.parameters()], grad))

    def check() -> bool:
        run(dense)
        pairs = zip(results[layer], results[dense], strict=True)
        return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item()) for a, b in pairs)

    return Contest(partial(run, layer), partial(run, dense), check)


def _every_tenth(x: Tensor, dim: int) -> Tensor:
    live = torch.arange(x.shape[dim]) % 10 == 0
    return x * live.view([-1 if at == dim else 1 for at in range(x.dim())])


def _every_eighth_tile(x: Tensor) -> Tensor:
    rows, columns = torch.arange(len(x))[:, None] // TILE, torch.arange(x.shape[1]) // TILE
    return x * ((rows + columns) % 8 == 0)
