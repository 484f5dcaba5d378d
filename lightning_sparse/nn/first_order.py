"""first_order: refuses to differentiate a gradient whose own derivative is not implemented."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Backward = Callable[..., Any]


def first_order(owner: str, dense: str) -> Callable[[Backward], Backward]:
    """Marks the backward pass of an `autograd.Function` that may not be differentiated itself.

    `once_differentiable` complains only where the upstream gradient needs one, and leaves terms out where it does not.

    Args:
        owner: name of the layer, for the message.
        dense: layer that can be differentiated twice.
    """

    def mark(backward: Backward) -> Backward:
        @wraps(backward)
        def call(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{owner}: expected a backward pass that is not differentiated itself, got create_graph=True: leave"
                    f" that out, or use {dense}, which has second derivatives"
                )
            return backward(ctx, *grads)

        return call

    return mark
