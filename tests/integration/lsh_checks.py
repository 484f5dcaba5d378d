"""What every rank checks of an `LSHLinear` whose rows lie on all of them; started by `test_lsh_ranks.py`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.communicators import ProcessGroup
from lightning_sparse.communicators.volume import gather_bytes
from lightning_sparse.nn.crossover import pinned
from lightning_sparse.nn.lsh_linear import LSHLinear
from tests.integration.launch import run_checks

H, N, B = 8, 203, 4
OPTIONS = {"tables": 3, "bits": 3, "bucket": 8, "tail": 20, "dtype": torch.float64}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(transport: ProcessGroup, classes: int = N) -> tuple[LSHLinear, nn.Linear]:
    """The layer with its rows of a whole one, and the whole one, equal on every rank."""
    whole = nn.Linear(H, classes, dtype=torch.float64)
    with torch.no_grad():
        whole.weight.copy_(normal(classes, H, seed=3))
        whole.bias.copy_(normal(classes, seed=4))
    layer = LSHLinear(H, classes, transport=transport, **OPTIONS)
    own = slice(transport.rank, None, transport.world_size)
    layer.load_state_dict({"weight": whole.weight[own], "bias": whole.bias[own]})
    return layer, whole


def samples(world_size: int, classes: int = N) -> tuple[Tensor, Tensor]:
    """Those of all ranks: [w, b, h] and [w, b]."""
    targets = torch.randint(classes, (world_size, B), generator=torch.Generator().manual_seed(8))
    return normal(world_size, B, H, seed=7), targets


def mean_of_all(grad: Tensor, transport: ProcessGroup) -> Tensor:
    out = grad.clone()
    dist.all_reduce(out)
    return out / transport.world_size


def all_rows(transport: ProcessGroup) -> dict[str, Tensor]:
    """Loss, gradients and predictions are those of the whole layer on one device."""
    for training in (True, False):
        layer, whole = make(transport)
        layer.train(training)
        xs, targets = samples(transport.world_size)
        x, target = xs[transport.rank].clone().requires_grad_(), targets[transport.rank]
        with pinned(0):
            loss = layer.loss(x, target)
        # scaled as a loss scaler would
        (8 * loss).backward()
        y = xs[transport.rank].clone().requires_grad_()
        expected = F.cross_entropy(whole(y), target)
        (8 * expected).backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(x.grad, y.grad)
        for got, want in ((layer.weight.grad, whole.weight.grad), (layer.bias.grad, whole.bias.grad)):
            own = mean_of_all(want, transport)[transport.rank :: transport.world_size]
            torch.testing.assert_close(got.to_dense(), own)
        assert torch.equal(layer.predict(x), whole(y).argmax(1))
    return {}


def active_rows(transport: ProcessGroup) -> dict[str, Tensor]:
    """The estimate is the sum over what all ranks have active, and so are the gradients."""
    world = transport.world_size
    layer, whole = make(transport)
    xs, targets = samples(world)
    x, target = xs[transport.rank].clone().requires_grad_(), targets[transport.rank]
    with pinned(1):
        active = layer._active(xs.flatten(0, 1), targets.flatten(), 0)
        losses = layer.loss(x, target, reduction="none")
    every: list[Any] = [None] * world
    dist.all_gather_object(every, active)
    y = xs.clone().requires_grad_()
    logits = whole(y.flatten(0, 1))
    rows = torch.cat([each.rows * world + rank for rank, each in enumerate(every)])
    assert len(rows) < N
    offsets = torch.cat([each.offset for each in every])
    aim = logits.gather(1, targets.flatten()[:, None]).squeeze(1)
    expected = (torch.logsumexp(logits[:, rows] + offsets, 1) - aim).view(world, B)
    torch.testing.assert_close(losses, expected[transport.rank])
    losses.mean().backward()
    expected.mean(1).sum().backward()
    torch.testing.assert_close(x.grad, y.grad[transport.rank])
    own = whole.weight.grad[transport.rank :: world] / world
    torch.testing.assert_close(layer.weight.grad.to_dense(), own)
    return {"losses": expected.detach()}


def traffic(transport: ProcessGroup) -> dict[str, Tensor]:
    """Bytes equal the formula, whatever the number of classes."""
    world, seen = transport.world_size, []
    for classes in (50, N, 5000):
        layer, _ = make(transport, classes)
        xs, targets = samples(world, classes)
        x = xs[transport.rank].clone().requires_grad_()
        before = transport.bytes
        with pinned(1):
            layer.loss(x, targets[transport.rank]).backward()
        seen.append(transport.bytes - before)
    floats = 8
    forward = gather_bytes(8, world) + gather_bytes(B * H * floats, world) + gather_bytes(B * 8, world)
    forward += gather_bytes(2 * world * B * floats, world)
    backward = gather_bytes(B * floats, world) + gather_bytes(B * H * floats, world)
    assert seen == [forward + backward] * 3
    return {}


def training(transport: ProcessGroup) -> dict[str, Tensor]:
    """Steps of a body that ranks average, under a layer that they share, are those of one device with all samples."""
    world = transport.world_size
    layer, whole = make(transport)
    body, reference = (nn.Linear(5, H, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for parameter in (*body.parameters(), *reference.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=5))
    ours = torch.optim.SGD([*body.parameters(), *layer.parameters()], lr=0.5)
    theirs = torch.optim.SGD([*reference.parameters(), *whole.parameters()], lr=0.5)
    _, targets = samples(world)
    for step in range(4):
        inputs = normal(world, B, 5, seed=20 + step)
        ours.zero_grad()
        with pinned(0):
            layer.loss(body(inputs[transport.rank]).relu(), targets[transport.rank]).backward()
        for parameter in body.parameters():
            parameter.grad = mean_of_all(parameter.grad, transport)
        ours.step()
        theirs.zero_grad()
        F.cross_entropy(whole(reference(inputs.flatten(0, 1)).relu()), targets.flatten()).backward()
        theirs.step()
    torch.testing.assert_close(body.weight, reference.weight)
    torch.testing.assert_close(layer.weight, whole.weight[transport.rank :: world])
    return {"body": body.weight.detach()}


class Classifier(nn.Module):
    """A body that every rank holds, and the shared layer."""

    def __init__(self, body: nn.Linear, output: nn.Linear) -> None:
        super().__init__()
        self.body, self.output = body, output

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(x).relu()
        if isinstance(self.output, LSHLinear):
            return self.output.loss(hidden, target)
        return F.cross_entropy(self.output(hidden), target)


def under_ddp(transport: ProcessGroup) -> dict[str, Tensor]:
    """DDP averages the body and leaves the shared rows alone: gradients are those of one device with all samples."""
    world = transport.world_size
    layer, whole = make(transport)
    body = nn.Linear(5, H, dtype=torch.float64)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.copy_(normal(*parameter.shape, seed=5))
    reference, model = Classifier(copy.deepcopy(body), whole), Classifier(body, layer)
    shared = [name for name, _ in model.named_parameters() if name.startswith("output.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, shared)
    wrapped = DistributedDataParallel(model)
    _, targets = samples(world)
    inputs = normal(world, B, 5, seed=31)
    for _ in range(2):
        model.zero_grad()
        with pinned(0):
            wrapped(inputs[transport.rank], targets[transport.rank]).backward()
    reference(inputs.flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(body.weight.grad, reference.body.weight.grad)
    own = whole.weight.grad[transport.rank :: world]
    torch.testing.assert_close(layer.weight.grad.to_dense(), own)
    return {"body": body.weight.grad}


def first_rows_differ(transport: ProcessGroup) -> dict[str, Tensor]:
    """Ranks that share one seed still begin with rows of their own."""
    torch.manual_seed(0)
    layer = LSHLinear(H, N, transport=transport, **OPTIONS)
    heads = transport.all_gather(layer.weight.detach()[:5].flatten().contiguous())
    assert len({tuple(row) for row in heads.tolist()}) == transport.world_size
    assert layer.weight.abs().max() <= 1 / math.sqrt(H)
    assert len(layer.weight) == len(range(transport.rank, N, transport.world_size))
    return {}


def refusals(transport: ProcessGroup) -> dict[str, Tensor]:
    """What does not fit is refused by every rank, and the ranks go on."""
    layer, _ = make(transport)
    count = B if transport.rank else B + 1
    with pytest.raises(ValueError, match=r"expected equally many samples on every rank, got \[5, 4"):
        layer.loss(normal(count, H), torch.zeros(count, dtype=torch.int64))
    bad = torch.full((B,), N if transport.rank else 0)
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {N}\)"):
        layer.loss(normal(B, H), bad)
    with pytest.raises(ValueError, match="expected a class for each of"):
        LSHLinear(H, 1, transport=transport)
    return {}


def main(rank: int, world_size: int, folder: str) -> None:
    checks = (all_rows, active_rows, traffic, training, under_ddp, first_rows_differ, refusals)
    run_checks(checks, rank, world_size, folder)
