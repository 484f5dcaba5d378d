"""Outer momentum and decay against loops written out by hand, on virtual ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.codecs import Raw
from lightning_sparse.communicators import AllGather, CompressedAllReduce, VirtualRanks
from lightning_sparse.compressors import TopK, WeightBlocks
from lightning_sparse.protocols import Communicator, Compressor, Transport
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant
from lightning_sparse.sync import Updates
from lightning_sparse.sync.steps import Steps
from lightning_sparse.sync.updates_tap import UpdatesTap

RANKS, STEPS, LR = 3, 12, 0.1


def gradient(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    config: Updates, density: float, compressor: Compressor, communicator: Communicator, numel: int = 32
) -> list[list[Tensor]]:
    """[rank][weights, anchor] after SGD steps with given gradients."""

    def task(transport: Transport) -> list[Tensor]:
        weight = nn.Parameter(torch.zeros(numel))
        optimizer = torch.optim.SGD([weight], lr=LR)
        parts = (compressor, Raw("fp32"), communicator)
        reducer = Reducer(*parts, transport, constant(density), torch.device("cpu"))
        tap = UpdatesTap(config, reducer, nn.ParameterList([weight]), [optimizer], lambda _: True)
        Steps(tap, [optimizer])
        for step in range(STEPS):
            weight.grad = gradient(transport.rank, step, numel)
            optimizer.step()
        own = weight.detach().clone()
        tap.finish()
        return [own, weight.detach()]

    return VirtualRanks(RANKS).run(task)


def blocks(density: float, numel: int) -> list[slice]:
    """The order in which ``WeightBlocks`` sends the vector of the first optimizer."""
    seen: list[slice] = []

    class Spy(WeightBlocks):
        def compress(self, accumulator, capacity, draw):  # type: ignore[no-untyped-def]
            out = super().compress(accumulator, capacity, draw)
            seen.append(slice(int(out.indices[0]), int(out.indices[-1]) + 1))
            return out

    def task(transport: Transport) -> None:
        weight = nn.Parameter(torch.zeros(numel))
        optimizer = torch.optim.SGD([weight], lr=LR)
        reducer = Reducer(Spy(), Raw(), AllGather(), transport, constant(density), torch.device("cpu"))
        Steps(UpdatesTap(Updates(), reducer, nn.ParameterList([weight]), [optimizer], lambda _: True), [optimizer])
        for _ in range(STEPS):
            weight.grad = torch.zeros(numel)
            optimizer.step()

    VirtualRanks(1).run(task)
    return seen


# sections of one entry are padding alone on two of three ranks
@pytest.mark.parametrize("numel", [32, 9, 1])
@pytest.mark.parametrize("communicator", [CompressedAllReduce(), AllGather()], ids=["sections", "whole blocks"])
@pytest.mark.parametrize("density", [1.0, 0.25])
@pytest.mark.parametrize(
    "config",
    [
        Updates(every=2, anchor_step=0.7, outer_momentum=0.9),
        Updates(outer_momentum=0.5, nesterov=False),
        Updates(every=3, decay=0.8),
        Updates(anchor_step=0.7, outer_momentum=0.9, decay=0.9),
    ],
    ids=["DiLoCo", "heavy ball", "decay", "all"],
)
def test_outer_momentum_and_decay_are_as_written(
    config: Updates, density: float, communicator: Communicator, numel: int
) -> None:
    order = [slice(0, numel)] * STEPS if density == 1 else blocks(density, numel)
    eta = float(config.anchor_step) if config.anchor_step is not None else 1.0  # type: ignore[arg-type]
    x, m = torch.zeros(numel), torch.zeros(numel)
    p = torch.zeros(RANKS, numel)
    for step in range(STEPS):
        p = p - LR * torch.stack([gradient(rank, step, numel) for rank in range(RANKS)])
        if (step + 1) % config.every:
            continue
        at = order[step // config.every]
        sent = p[:, at] - x[at]
        mean = sent.mean(0)
        m[at] = config.outer_momentum * m[at] + mean
        move = mean + config.outer_momentum * m[at] if config.nesterov else m[at]
        move = eta * (move if config.outer_momentum else mean)
        x[at] += move
        p[:, at] += move - sent
        p = x + config.decay * (p - x)
    for rank, (own, anchor) in enumerate(train(config, density, WeightBlocks(), communicator, numel)):
        torch.testing.assert_close(own, p[rank], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(anchor, x, rtol=1e-5, atol=1e-6)


def test_outer_momentum_of_entries_that_differ_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entries that are the same on every rank, got TopK.*use compressor"):
        train(Updates(outer_momentum=0.9), 0.25, TopK(), AllGather())
