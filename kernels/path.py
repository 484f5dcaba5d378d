"""Which of its two paths an op takes: the Triton kernel or torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_interpreting = False


def use_triton(tensor: Tensor) -> bool:
    """True for CUDA and ROCm tensors, and for CPU tensors inside `interpret`.

    `TRITON_INTERPRET=1` alone leaves CPU tensors on the torch path, which is what runs there in production.
    """
    return tensor.is_cuda or _interpreting


def interpreting() -> bool:
    """True inside `interpret`, whose interpreter has no arithmetic on bf16."""
    return _interpreting


@contextmanager
def interpret() -> Iterator[None]:
    """Runs the kernels themselves on CPU tensors, in every thread, until the block ends.

    Raises:
        RuntimeError: Triton would compile for a GPU, because `TRITON_INTERPRET` is not 1.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("expected TRITON_INTERPRET=1 before triton is imported, got no interpreter: set it first")
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
