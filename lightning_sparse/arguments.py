"""What the strategy accepts: every argument is checked before ranks talk to each other."""

from __future__ import annotations

import difflib
import inspect
import re
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_sparse.optim.adascale import AdaScale
from lightning_sparse.protocols import Codec, Communicator, Compressor, Memory
from lightning_sparse.sync import Gradients, Updates

OWN = (
    "density",
    "exchange",
    "compressor",
    "memory",
    "codec",
    "communicator",
    "seed",
    "residual_checkpoint",
    "on_nonfinite",
    "debug",
    "guard",
)


def is_linear(optimizer: Optimizer) -> bool:
    """Whether the step is linear in the gradient, so that delaying a part of it only delays its effect."""
    return type(_inner(optimizer)) is SGD


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.inner if isinstance(optimizer, AdaScale) else optimizer


def check_parts(density: Any, exchange: Any, compressor: Any, memory: Any, codec: Any, communicator: Any) -> None:
    """Raise ValueError or TypeError unless each is what its seam takes (None stands for the default)."""
    is_fraction = isinstance(density, (int, float)) and not isinstance(density, bool) and 0 < density <= 1
    if not (density is None or density == "auto" or callable(density) or is_fraction):
        raise ValueError(f"SparseDDPStrategy: density must be in (0, 1], 'auto' or a schedule, got {density!r}")
    if not (exchange == "auto" or isinstance(exchange, (Gradients, Updates))):
        raise ValueError(
            f"SparseDDPStrategy: exchange must be 'auto', Gradients(...) or Updates(...), got {exchange!r}"
        )
    check_memory(exchange, memory)
    seams = (
        ("compressor", compressor, Compressor, "TopK()"),
        ("memory", memory, Memory, "Residual()"),
        ("codec", codec, Codec, "Raw()"),
        ("communicator", communicator, Communicator, "AllGather()"),
    )
    for name, value, protocol, example in seams:
        if value is not None and (isinstance(value, type) or not isinstance(value, protocol)):
            raise TypeError(f"SparseDDPStrategy: {name} must be an object such as {example}, got {value!r}")


def check_memory(exchange: Any, memory: Memory | None) -> None:
    """Raise ValueError on a memory beside ``Updates``."""
    if isinstance(exchange, Updates) and memory is not None:
        raise ValueError(
            "SparseDDPStrategy: expected no memory with Updates, which keeps what was not sent in the weights,"
            f" got {memory}: pass exchange=Gradients() to use it"
        )


def check_on_nonfinite(value: Any) -> None:
    """Raise ValueError unless it says what becomes of a step whose gradients are not finite."""
    if value not in ("skip", "raise"):
        raise ValueError(f"SparseDDPStrategy: on_nonfinite must be 'skip' or 'raise', got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless an option is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"SparseDDPStrategy: {name} must be True or False, got {value!r}")


def check_unused(exchange: Gradients | Updates, codec: Codec, kwargs: dict[str, Any]) -> None:
    """Raise ValueError where DDP would throw away what a codec for blocks has rounded into unused parameters."""
    if isinstance(exchange, Gradients) and codec.agreed and kwargs.get("find_unused_parameters"):
        raise ValueError(
            f"SparseDDPStrategy: expected no find_unused_parameters with Gradients and {codec}, got True:"
            " use exchange=Updates(), which needs no such option, or another codec"
        )


def check_optimizers(exchange: Gradients | Updates, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError on an optimizer that divides its work over ranks beside ``Updates``."""
    for optimizer in optimizers:
        optimizer = _inner(optimizer)
        if isinstance(exchange, Updates) and getattr(getattr(optimizer, "operator", None), "replicated", False):
            raise ValueError(
                f"SparseDDPStrategy: expected no PTO() with Updates, whose ranks step on gradients of their own, got"
                f" one in {type(optimizer).__name__}: use exchange=Gradients(), or no operator"
            )


def check_parameters(module: nn.Module) -> None:
    """Raise unless there is something to train, of types that the exchange carries.

    Raises:
        ValueError: no parameter is trainable.
        TypeError: a trainable parameter is neither float32, bfloat16 nor float16.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError(
            f"SparseDDPStrategy: expected a module with trainable parameters, got {type(module).__name__} with none:"
            " unfreeze a parameter, or use a strategy for one device"
        )
    for name, parameter in trainable.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"SparseDDPStrategy: expected float32, bfloat16 or float16 parameters, got {parameter.dtype} in"
                f" {name!r}: convert it, or use strategy='ddp'"
            )


def check_ranks_agree(options: str, module: nn.Module) -> None:
    """Raise ValueError on every rank unless all pass the same text and like parameters. Every rank calls it.

    Ranks with other options would wait for each other for ever, or read bytes as what they are not.
    """
    layout = [(name, tuple(p.shape), p.dtype) for name, p in module.named_parameters() if p.requires_grad]
    description = f"{options}, {len(layout)} parameters (layout {zlib.crc32(repr(layout).encode()):08x})"
    texts: list[Any] = [None] * dist.get_world_size()
    # a schedule prints its address, which differs between processes
    dist.all_gather_object(texts, re.sub(r" at 0x[0-9a-f]+", "", description))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"SparseDDPStrategy: expected the same options and parameters on every rank, got {texts[0]} on rank 0"
                f" and {text} on rank {rank}: configure all ranks alike"
            )


def check_ddp_options(kwargs: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError on options of DDPStrategy that would take the hook away from us, TypeError on unknown ones.

    Args:
        kwargs: what was given beside our own arguments.
        known: names that ``DDPStrategy`` takes itself.
    """
    # with Updates no DDP is built that would complain
    allowed = (*known, *list(inspect.signature(DistributedDataParallel.__init__).parameters)[2:])
    for name in kwargs:
        if name not in allowed:
            near = difflib.get_close_matches(name, [*OWN, *allowed], n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"expected one of {sorted({*OWN, *allowed})}"
            raise TypeError(f"SparseDDPStrategy: got an unknown argument {name!r}: {advice}")
    advice = "sparse_ddp registers its own hook; use strategy='ddp' for another one"
    for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
        if kwargs.get(name) is not None:
            raise ValueError(f"SparseDDPStrategy: expected no {name}, got {kwargs[name]!r}: {advice}")
    state = kwargs.get("ddp_comm_state")
    if isinstance(state, PostLocalSGDState) or kwargs.get("model_averaging_period") is not None:
        raise ValueError(
            "SparseDDPStrategy: expected no post-local SGD (ddp_comm_state, model_averaging_period), got it:"
            " use exchange=Updates(every=H) for local steps"
        )
    if state is not None:
        raise ValueError(f"SparseDDPStrategy: expected no ddp_comm_state, got {state!r}: {advice}")
    if kwargs.get("mixed_precision") is not None:
        raise ValueError(
            f"SparseDDPStrategy: expected no DDP mixed_precision, got {kwargs['mixed_precision']!r}:"
            " it registers a hook of its own; use Trainer(precision='bf16-mixed')"
        )
