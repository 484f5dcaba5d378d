"""Steps: tells the tap of every optimizer step, whoever makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_sparse.protocols import Tap


class Steps:
    """Announces steps that Lightning makes (also those that a loss scaler skips), and those behind its back.

    Args:
        tap: is told before and after each step.
        optimizers: manual optimization may step them without asking Lightning; their hooks tell.
    """

    def __init__(self, tap: Tap, optimizers: Sequence[Optimizer]) -> None:
        self._tap = tap
        self._inside = False
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    @contextmanager
    def announced(self, optimizer: Optimizer) -> Iterator[None]:
        """Around a step that Lightning makes."""
        self._tap.before_step(optimizer)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._tap.after_step(optimizer)

    def close(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._inside:
            self._tap.before_step(optimizer)
        # step(self, closure): what runs in the closure is still the user's, weights move behind it
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._then_begin(args[1], optimizer), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._then_begin(kwargs["closure"], optimizer)}
        self._tap.begin_update(optimizer)
        return None

    def _then_begin(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def wrapped() -> Any:
            # an optimizer may call it again
            self._tap.end_update(optimizer)
            result = closure()
            self._tap.begin_update(optimizer)
            return result

        return wrapped

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._tap.end_update(optimizer)
        if not self._inside:
            self._tap.after_step(optimizer)
