"""What `bench layers` times: a sparse layer against the dense one it replaces, forward + backward.

A layer joins by one function in `CASES`, from (device, quick) to its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sparse.nn import NM, BlockSparseLinear
from lightning_sparse.nn.block_product import block_crossover, blocks_of_matrix
from lightning_sparse.nn.crossover import Run

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Contest:
    """Two runs of the same work.

    Args:
        sparse: a forward and backward of the layer, as it is shipped: it may choose its dense path.
        dense: the same of torch's layer.
        check: True if what `sparse` last computed is right; called before anything is timed.
        crossover: measures up to which density the sparse path is the faster one; None where there is no density.
    """

    sparse: Run
    dense: Run
    check: Callable[[], bool]
    crossover: Callable[[], float] | None = None


@dataclass(frozen=True)
class LayerCase:
    """One row of the table; `make` builds its contest, and what it holds is dropped afterwards."""

    layer: str
    case: str
    make: Callable[[], Contest]


def block_sparse_linear(device: torch.device, quick: bool) -> Iterator[LayerCase]:
    """Densities, blocks, batches and an odd shape."""
    rows = 128 if device.type == "cpu" else 4096
    yield from (_blocks(4096, 4096, 64, density, rows, device) for density in (0.1, 0.25, 0.5, 1.0))
    if quick:
        return
    yield from (_blocks(4096, 4096, block, 0.1, rows, device) for block in (16, 32, 128))
    yield from (_blocks(4096, 4096, 64, 0.1, few, device) for few in (1, 16, 1024))
    yield _blocks(1000, 3000, 64, 0.1, rows, device)
    yield _blocks(256, 256, 64, 0.1, rows, device)


def nm(device: torch.device, quick: bool) -> Iterator[LayerCase]:
    """2:4, in the batches where half precision pays on a GPU, and in one where it does not."""
    batches = (128,) if device.type == "cpu" else (4096,) if quick else (1, 128, 4096, 16384)
    yield from (_nm(4096, 4096, rows, device) for rows in batches)


CASES: list[Callable[[torch.device, bool], Iterator[LayerCase]]] = [
    block_sparse_linear,
    nm,
]


def _blocks(out: int, inner: int, block: int, density: float, rows: int, device: torch.device) -> LayerCase:
    dtype = _dtype(device)

    def make() -> Contest:
        dense, x, grad = _operands(out, inner, rows, device, dtype)
        layer = BlockSparseLinear.from_linear(dense, block=block, density=density)
        layout, twin = layer._layout, layer.dense_weight().detach()

        def check() -> bool:
            wanted = blocks_of_matrix(x.detach().double().t() @ grad.double(), layout)
            return _near(layer.weight.grad, wanted) and _near(x.grad, grad.double() @ twin.double())

        def crossover() -> float:
            return block_crossover(x.detach(), rows, layout, packed=False).density

        return Contest(_run(layer, x, grad), _run(dense, x, grad), check, crossover)

    case = f"{out}x{inner}, block {block}, density {density:g}, {rows} rows, {NAMES[dtype]}"
    return LayerCase("BlockSparseLinear", case, make)


def _nm(out: int, inner: int, rows: int, device: torch.device) -> LayerCase:
    dtype = _dtype(device)

    def make() -> Contest:
        dense, x, grad = _operands(out, inner, rows, device, dtype)
        layer = NM(inner, out, device=device, dtype=dtype)
        layer.load_state_dict(dense.state_dict())

        def check() -> bool:
            pruned = layer.masked_weight()
            halves = bool(pruned.view(out, inner // 4, 4).ne(0).sum(2).eq(2).all())
            wanted = (grad.double().t() @ x.detach().double()) * pruned.ne(0)
            return halves and _near(layer.weight.grad, wanted) and _near(x.grad, grad.double() @ pruned.double())

        return Contest(_run(layer, x, grad), _run(dense, x, grad), check)

    return LayerCase("NM", f"2:4, {out}x{inner}, {rows} rows, {NAMES[dtype]}", make)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _operands(
    out: int, inner: int, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Linear, Tensor, Tensor]:
    """The dense layer, an input that takes a gradient, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    dense = nn.Linear(inner, out, device=device, dtype=dtype)
    with torch.no_grad():
        dense.weight.copy_(torch.randn(out, inner, generator=generator) / inner**0.5)
    x = torch.randn(rows, inner, generator=generator).to(device, dtype).requires_grad_()
    return dense, x, torch.randn(rows, out, generator=generator).to(device, dtype)


def _run(layer: nn.Module, x: Tensor, grad: Tensor) -> Run:
    def run() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        layer(x).backward(grad)

    return run


def _near(got: Tensor | None, want: Tensor) -> bool:
    if got is None:
        return False
    bound = (1e-4 if got.dtype == torch.float32 else 5e-2) * float(want.abs().max())
    return bool((got.double() - want).abs().max() <= bound)
