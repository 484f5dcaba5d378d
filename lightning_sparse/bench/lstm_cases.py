"""What `bench layers` times of `SparseLSTM`: whole steps against `nn.LSTM`, backward passes against the dense cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sparse.bench.layer_cases import Contest, LayerCase
from lightning_sparse.nn.gate_selection import GateSelection
from lightning_sparse.nn.lstm_scan import lstm_scan
from lightning_sparse.nn.sparse_lstm import SparseLSTM
from lightning_sparse.nn.work import Work

SIZES = [(32, 32, 512, 512), (64, 32, 512, 512), (20, 35, 650, 650), (32, 64, 128, 512), (32, 64, 128, 128)]
QUICK_SIZES = SIZES[:1]


def sparse_lstm(device: torch.device, quick: bool) -> Iterator[LayerCase]:
    """Batches, sequences and widths; half of the gate gradients, and a quarter."""
    for batch, steps, inner, hidden in QUICK_SIZES if quick else SIZES:
        size = f"{batch} x {steps} steps, {inner} to {hidden}"
        for density in (0.5, 0.25):
            make = partial(_steps, batch, steps, inner, hidden, density, device)
            yield LayerCase("SparseLSTM", f"{size}, density {density:g}, against nn.LSTM", make)
        make = partial(_backward, batch, steps, inner, hidden, device)
        yield LayerCase("SparseLSTM", f"{size}, density 0.5, backward, against the dense cell", make)


def _steps(batch: int, steps: int, inner: int, hidden: int, density: float, device: torch.device) -> Contest:
    layer = SparseLSTM(inner, hidden, density=density, device=device)
    dense = nn.LSTM(inner, hidden, device=device)
    dense.load_state_dict(layer.state_dict())
    x, grad = _inputs(batch, steps, inner, hidden, device)
    outputs: list[Tensor] = []

    def run(module: nn.LSTM) -> None:
        module.zero_grad()
        x.grad = None
        out, _ = module(x)
        out.backward(grad)
        outputs[:] = [out.detach()]

    def check() -> bool:
        work = layer.work.weight_gradient
        halved = not work.done or abs(work.done / (work.done + work.skipped) - density) < 0.01
        return halved and torch.allclose(outputs[0], dense(x)[0], atol=1e-5)

    return Contest(
        partial(run, layer), partial(run, dense), check, lambda: layer._crossover(x, layer._selection(0)).density
    )


def _backward(batch: int, steps: int, inner: int, hidden: int, device: torch.device) -> Contest:
    x, grad = _inputs(batch, steps, inner, hidden, device)
    w_ih, w_hh, b_ih, b_hh = nn.LSTM(inner, hidden, device=device).all_weights[0]
    state = x.new_zeros(batch, hidden)

    def backward(density: float) -> Callable[[], tuple[Tensor, ...]]:
        selection = GateSelection(density, None, "column", SparseLSTM(1, 1).chunk)
        out, _, _ = lstm_scan(x, state, state, w_ih, w_hh, b_ih + b_hh, selection, Work())
        return lambda: torch.autograd.grad(out, [x, w_ih, w_hh, b_ih, b_hh], grad, retain_graph=True)

    sparse, dense = backward(0.5), backward(1.0)

    def check() -> bool:
        # the largest half of the columns holds most of the gradient
        cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(sparse(), dense(), strict=True)]
        return all(float(cosine) > 0.5 for cosine in cosines)

    return Contest(sparse, dense, check)


def _inputs(batch: int, steps: int, inner: int, hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps, batch, inner, generator=generator).to(device).requires_grad_()
    return x, torch.randn(steps, batch, hidden, generator=generator).to(device)
