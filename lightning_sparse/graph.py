"""What the graph of a loss tells of the module that made it."""

from __future__ import annotations

from torch import Tensor


def is_reentrant(loss: Tensor) -> bool:
    """Whether a part of it is computed again in the backward pass, in a pass of its own (activation checkpointing)."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False
