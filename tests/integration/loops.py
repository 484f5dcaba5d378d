"""Plain training loops over a transport: the same function trains a real rank and a virtual one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_sparse.bench.simulate import GradientBucket
from lightning_sparse.codecs import Quantized, Raw
from lightning_sparse.communicators import AllGather, CompressedAllReduce
from lightning_sparse.compressors import SampledTopK, TopK, WeightBlocks
from lightning_sparse.memory import MomentumResidual
from lightning_sparse.protocols import Compressor, Transport
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant, piecewise
from lightning_sparse.sync import Gradients, Updates
from lightning_sparse.sync.gradients import GradientsTap
from lightning_sparse.sync.updates_tap import UpdatesTap

STEPS = 12
Result = dict[str, Tensor]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.Tanh(), nn.Linear(128, 64))


# made once: threads of virtual ranks must not race for the global generator
_MODEL = model()


def loss(net: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (net(x) - x.sum(1, keepdim=True).tanh()).square().mean()


def make_reducer(transport: Transport, compressor: Compressor, density: float) -> Reducer:
    schedule = piecewise({0: 1.0, 2: density}) if density < 0.05 else constant(density)
    codec = Quantized(4) if compressor.agreed else Raw()
    communicator = CompressedAllReduce() if compressor.agreed else AllGather()
    return Reducer(compressor, codec, communicator, transport, schedule, torch.device("cpu"))


def finished(net: nn.Module, reducer: Reducer, transport: Transport) -> Result:
    reducer.close()
    return {**{k: v.detach().clone() for k, v in net.state_dict().items()}, "bytes": torch.tensor(transport.bytes)}


def updates(transport: Transport, config: Updates, compressor: Compressor, density: float) -> Result:
    net = copy.deepcopy(_MODEL)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    reducer = make_reducer(transport, compressor, density)
    tap = UpdatesTap(config, reducer, net, [optimizer], lambda _: False)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, transport.rank, step).backward()
        tap.before_step(optimizer)
        optimizer.step()
        tap.after_step(optimizer)
        if step == 5:
            tap.enter_shared()
            tap.leave_shared()
    tap.finish()
    return finished(net, reducer, transport)


def gradients(transport: Transport, compressor: Compressor, density: float) -> Result:
    net = copy.deepcopy(_MODEL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    reducer = make_reducer(transport, compressor, density)
    tap = GradientsTap(Gradients(), reducer, MomentumResidual(0.9, clip=1.0), net, False, lambda: 1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, transport.rank, step).backward()
        bucket = GradientBucket(list(net.parameters()))
        tap.hook(None, bucket).wait()
        tap.check()
        bucket.write()
        optimizer.step()
    return finished(net, reducer, transport)


LOOPS: dict[str, Callable[[Transport], Result]] = {
    "updates": lambda transport: updates(transport, Updates(), TopK(), 0.1),
    "updates layer": lambda transport: updates(transport, Updates(every=2, overlap=False), TopK(scope="layer"), 0.1),
    "updates sampled": lambda transport: updates(transport, Updates(anchor_step=1.0), SampledTopK(), 0.02),
    "updates blocks": lambda transport: updates(transport, Updates(), WeightBlocks(), 0.2),
    "gradients blocks": lambda transport: gradients(transport, WeightBlocks(), 0.2),
    "gradients": lambda transport: gradients(transport, TopK(), 0.1),
    "gradients sampled": lambda transport: gradients(transport, SampledTopK(), 0.02),
}
