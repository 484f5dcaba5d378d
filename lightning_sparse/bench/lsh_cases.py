"""What `bench layers` times of `LSHLinear`: steps against the whole softmax, without and with the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sparse.bench.layer_cases import Contest, LayerCase
from lightning_sparse.nn.lsh_linear import LSHLinear

WIDTH, BATCH = 128, 64
CLASSES = (200_000, 50_000, 10_000)
# steps of one timed run, which hash all rows once: five times as often as by default
STEPS = 10


def lsh_linear(device: torch.device, quick: bool) -> Iterator[LayerCase]:
    """Numbers of classes, down to where the whole softmax is as fast."""
    for classes in CLASSES[:1] if quick else CLASSES:
        for adam in (False, True):
            what = f"{STEPS} steps with Adam" if adam else f"{STEPS} steps"
            case = f"{classes:,} classes, width {WIDTH}, batch {BATCH}, {what}, hashed once"
            yield LayerCase("LSHLinear", case, partial(_steps, classes, adam, device))


def _steps(classes: int, adam: bool, device: torch.device) -> Contest:
    generator = torch.Generator().manual_seed(0)
    layer, dense = LSHLinear(WIDTH, classes, device=device, rebuild=STEPS), nn.Linear(WIDTH, classes, device=device)
    dense.load_state_dict(layer.state_dict())
    x = torch.randn(BATCH, WIDTH, generator=generator).to(device).requires_grad_()
    target = torch.randint(classes, (BATCH,), generator=generator).to(device)
    # too small to move what is checked, and no cheaper
    ours, theirs = (
        kind(module.parameters(), lr=1e-9)
        for kind, module in ((torch.optim.SparseAdam, layer), (torch.optim.Adam, dense))
    )
    losses: list[Tensor] = []

    def sparse() -> None:
        losses.clear()
        for _ in range(STEPS):
            x.grad = None
            ours.zero_grad()
            losses.append(layer.loss(x, target))
            losses[-1].backward()
            if adam:
                ours.step()

    def whole() -> None:
        for _ in range(STEPS):
            x.grad = None
            theirs.zero_grad()
            F.cross_entropy(dense(x), target).backward()
            if adam:
                theirs.step()

    def check() -> bool:
        exact = F.cross_entropy(dense(x), target).item()
        mean = sum(loss.item() for loss in losses) / STEPS
        # an estimate from thousands of classes of nearly equal logits
        return math.isclose(mean, exact, rel_tol=0.01) and layer.weight.grad is not None

    return Contest(sparse, whole, check, lambda: layer._crossover(BATCH, layer.step).density)
