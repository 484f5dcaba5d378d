"""Steps: tells the tap of every optimizer step, whoever makes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_sparse.protocols import Stepped
from lightning_sparse.sync.closures import behind_closure

log = logging.getLogger(__name__)


class Steps:
    """Announces steps that Lightning makes (also those that a loss scaler skips), and those behind its back.

    Args:
        tap: is told before and after each step.
        optimizers: manual optimization may step them without asking Lightning; their hooks tell.
        on_nonfinite: "skip" or "raise", for steps whose gradients are not finite; None lets them be, as where a loss
            scaler looks after that.
    """

    def __init__(self, tap: Stepped, optimizers: Sequence[Optimizer], on_nonfinite: str | None = None) -> None:
        self.skipped = 0
        self.seconds = 0.0
        """That the tap has kept the training loop waiting beside steps."""
        self._tap = tap
        self._on_nonfinite = on_nonfinite
        self._inside = self._is_refused = False
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    @contextmanager
    def announced(self, optimizer: Optimizer) -> Iterator[None]:
        """Around a step that Lightning makes."""
        self._timed(partial(self._tap.before_step, announced=True), optimizer)
        self._inside, self._is_refused = True, False
        try:
            yield
        finally:
            self._inside = False
            self._tap.end_step(optimizer)
        self._timed(self._tap.after_step, optimizer)

    def guarded(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of a step that Lightning makes, with a look at the gradients behind it."""

        def run() -> Any:
            result = closure()
            self._look(optimizer)
            return result

        return run

    def close(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            # clipping by value comes in between, and fails without gradients
            return behind_closure(args, kwargs, lambda: self._drop_refused(optimizer))
        self._is_refused = False
        self._timed(self._tap.before_step, optimizer)
        self._look(optimizer)
        self._drop_refused(optimizer)
        return None

    def _look(self, optimizer: Optimizer) -> None:
        if self._on_nonfinite is None or not self._tap.refuses(optimizer):
            return
        where = f"{type(optimizer).__name__} after {self._tap.steps} steps"
        if self._on_nonfinite == "raise":
            self._tap.give_up(
                f"sparse_ddp: expected finite gradients on every rank, got NaN or inf for {where}: lower the learning"
                " rate, or pass on_nonfinite='skip'"
            )
        else:
            self.skipped += 1
            # the 1st, 2nd, 4th, 8th: a training that has gone bad for good does not fill the log
            if self.skipped.bit_count() == 1:
                log.warning(
                    f"sparse_ddp: NaN or inf in gradients for {where}: this step is skipped ({self.skipped} so far)"
                )
        self._is_refused = True

    def _drop_refused(self, optimizer: Optimizer) -> None:
        """Optimizers pass over parameters without gradient: no weight, no momentum, no decay moves."""
        if not self._is_refused:
            return
        for entry in optimizer.param_groups:
            for parameter in entry["params"]:
                parameter.grad = None

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._inside:
            self._timed(self._tap.after_step, optimizer)

    def _timed(self, tell: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        start = time.perf_counter()
        tell(optimizer)
        self.seconds += time.perf_counter() - start
