"""eager: keeps torch.compile out of a function, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that runs uncompiled within compiled models, as `torch.compiler.disable` does.

    That one imports the compiler, and triton with it, when the function is defined.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return torch._dynamo.disable(function)(*args, **kwargs)

    return call
