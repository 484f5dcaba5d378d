"""What `bench network` compares: the strategies of a Trainer, by name, made on the rank that trains with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_sparse.codecs import Quantized
from lightning_sparse.compressors import TopK
from lightning_sparse.sync import Gradients, Updates


def _dense(hook: str | None = None) -> Callable[[], Any]:
    def make() -> Any:
        # Lightning is imported on the ranks, not by whoever lists the names
        from lightning_sparse.bench import baselines

        return baselines.DDPStrategy() if hook is None else getattr(baselines, hook)()

    return make


def _sparse(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from lightning_sparse.pytorch_lightning import SparseDDPStrategy

        return SparseDDPStrategy(**{"guard": False, **options})

    return make


DENSE = "ddp"
BOUND = "alone"
GUARDED = "guarded"
AUTO = "updates-auto"
# measure for some time before they are what they will be
_SETTLING = (GUARDED, AUTO)

CONTENDERS: dict[str, Callable[[], Any]] = {
    DENSE: _dense(),
    "ddp-fp16": _dense("HalfDDP"),
    "ddp-powersgd": _dense("PowerSGDDDP"),
    "updates": _sparse(exchange=Updates()),
    "updates-overlap": _sparse(exchange=Updates(overlap=True)),
    "updates-every4": _sparse(exchange=Updates(every=4)),
    "updates-4bit": _sparse(exchange=Updates(), density=0.01, codec=Quantized(4)),
    "updates-topk": _sparse(exchange=Updates(), density=0.01, compressor=TopK()),
    "gradients": _sparse(exchange=Gradients(), density=0.01),
    # as many bytes as the link has time for beside the computation
    AUTO: _sparse(exchange=Updates(overlap=True), density="auto"),
    # the default, which measures for some time what is faster here; the others always exchange
    GUARDED: _sparse(guard=True),
    # every rank by itself: what no exchange can beat
    BOUND: lambda: "auto",
}
USUAL = [name for name in CONTENDERS if name not in _SETTLING]


def warmup_of(name: str) -> int:
    """Steps of a training that are left out of its times: a multiple of 4, as local steps exchange every 4 steps."""
    return 80 if name in _SETTLING else 4
