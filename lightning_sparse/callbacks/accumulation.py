"""How many passes a step accumulates, now and later."""

from __future__ import annotations

from typing import Any


def accumulated(trainer: Any, epoch: int) -> int:
    """Passes of a step in an epoch, also where a callback sets them when it begins."""
    for callback in trainer.callbacks:
        if hasattr(callback, "get_accumulate_grad_batches"):
            return int(callback.get_accumulate_grad_batches(epoch))
    return int(trainer.accumulate_grad_batches)


def most_accumulated(trainer: Any) -> int:
    """Passes of the largest step in any epoch."""
    setters = [callback for callback in trainer.callbacks if hasattr(callback, "get_accumulate_grad_batches")]
    changes = [epoch for callback in setters for epoch in getattr(callback, "scheduling", ())]
    return max(accumulated(trainer, epoch) for epoch in (0, *changes))
