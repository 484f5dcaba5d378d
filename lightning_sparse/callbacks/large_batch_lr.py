"""LargeBatchLR: learning rates that follow the batch of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import rich
from torch.utils._pytree import tree_leaves

from lightning_sparse.callbacks.ramp import Ramp
from lightning_sparse.callbacks.rates import check_alone
from lightning_sparse.callbacks.scaled_steps import ScaledSteps

Rule = Callable[[float], float]
"""From batch / base batch to the factor on learning rates."""

RULES: dict[str, Rule] = {"linear": float, "sqrt": math.sqrt}


class BatchLR:
    """Multiplies learning rates by what the batch calls for: batch per rank x accumulation x ranks, over a base batch.

    Give optimizers and schedulers the rates that are right at the base batch. The factor is applied while an optimizer
    steps and taken back behind it, so it composes with any scheduler, one that computes the next rate from the last
    one included, keeps the ratios of parameter groups, and does not compound. A rate that is set within a step
    (``on_before_optimizer_step``) goes without the factor, and is warned of. ``LearningRateMonitor`` shows rates
    without the factor; it is logged beside them:

    - ``large_batch/factor``: on the learning rates in the step that was made last.
    - ``large_batch/batch``: examples of all ranks in one step.

    At the beginning the factor is 1; it moves linearly to its value within the warm-up (Goyal et al.). Whenever the
    batch changes, on resuming with another number of ranks or by ``GradientAccumulationScheduler``, it moves to the new
    value in the same way. Checkpoints hold where it is. Rank zero prints one line at the first batch, and one when
    the batch has changed.

    "linear" suits SGD, "sqrt" adaptive optimizers; both hold up to a batch that depends on the problem. Not to be
    combined with another callback or wrapper that sets learning rates from the batch (``AdaScale``, ``AutoWarmup``).

    Sources: Goyal et al., "Accurate, Large Minibatch SGD", https://arxiv.org/abs/1706.02677 (linear rule, gradual
    warm-up); Krizhevsky, "One weird trick for parallelizing convolutional neural networks",
    https://arxiv.org/abs/1404.5997 (square root); Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", https://arxiv.org/abs/2205.10287 (square root for Adam).

    Args:
        base_batch: examples in one step of all ranks for which the learning rates were chosen, at least 1.
        rule: "linear", "sqrt", or a function from batch / base_batch to the factor.
        warmup_steps: optimizer steps from the factor in force to a new one; 0 jumps.
        warmup_epochs: the same in epochs, fractions allowed. Give one of both.
        batch_size: examples of one rank between two backward passes; None reads the training loader's. With manual
            optimization: of one rank in one step.

    Raises:
        ValueError: on arguments out of range; when training begins, on loaders whose batch size is not known, or on a
            rule whose factor is not positive.

    Example:
        >>> from lightning_sparse.callbacks import LargeBatchLR
        >>> callback = LargeBatchLR(base_batch=256, rule="linear", warmup_epochs=5)
    """

    owns_learning_rate = True

    def __init__(
        self,
        base_batch: int,
        rule: str | Rule = "linear",
        warmup_steps: int = 0,
        warmup_epochs: float = 0.0,
        batch_size: int | None = None,
    ) -> None:
        for name, value in (("base_batch", base_batch), ("batch_size", batch_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"LargeBatchLR: {name} must be an integer of at least 1, got {value!r}")
        if not (callable(rule) or rule in RULES):
            raise ValueError(f"LargeBatchLR: rule must be one of {list(RULES)} or a function, got {rule!r}")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(f"LargeBatchLR: warmup_steps must be an integer of at least 0, got {warmup_steps!r}")
        if not 0 <= warmup_epochs < math.inf:
            raise ValueError(f"LargeBatchLR: warmup_epochs must be at least 0, got {warmup_epochs!r}")
        if warmup_steps and warmup_epochs:
            raise ValueError(
                f"LargeBatchLR: expected warmup_steps or warmup_epochs, got both ({warmup_steps} and {warmup_epochs})"
            )
        self.base_batch, self.rule, self.batch_size = base_batch, rule, batch_size
        self.warmup_steps, self.warmup_epochs = warmup_steps, warmup_epochs
        self._ramps: list[Ramp] = []
        self._steps: list[ScaledSteps] = []
        self._loaded: Mapping[str, Any] | None = None
        self._batch: int | None = None
        self._before: int | None = None
        self._factor = 1.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._ramps = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        check_alone(self, [*trainer.callbacks, *trainer.optimizers], "learning rates from the batch")
        self._ramps = [Ramp(self.warmup_steps or self.warmup_epochs) for _ in trainer.optimizers]
        self._batch = self._before = None
        if self._loaded is not None:
            self._load(self._loaded)
        self._loaded = None
        # what cannot be known stops all ranks here, before the first collective
        self._batch_size(trainer)
        if self.warmup_epochs:
            self._steps_per_epoch(trainer)
        self._steps = [self._follow(trainer, *pair) for pair in zip(trainer.optimizers, self._ramps, strict=True)]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for steps in self._steps:
            steps.restore()
        # behind the hooks of an epoch's start, which may have changed the accumulation
        self._aim(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        figures = {"large_batch/factor": self._factor, "large_batch/batch": float(self._batch or 0)}
        pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # before a checkpoint of what is left is written
        for steps in self._steps:
            steps.restore()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for steps in self._steps:
            steps.close()
        self._steps, self._loaded = [], None

    def state_dict(self) -> dict[str, Any]:
        """Where the factor of each optimizer is, and the batch that it is for; before training, what it begins with."""
        if self._loaded is not None or not self._ramps:
            return dict(self._loaded or {})
        return {"batch": self._batch, "ramps": [ramp.state_dict() for ramp in self._ramps]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep it until training begins, when the number of optimizers is known."""
        self._loaded = dict(state_dict) or None

    def _load(self, state: Mapping[str, Any]) -> None:
        if len(state["ramps"]) != len(self._ramps):
            raise ValueError(
                f"LargeBatchLR: expected a checkpoint of {len(self._ramps)} optimizers, got one of"
                f" {len(state['ramps'])}: it belongs to another model"
            )
        for ramp, saved in zip(self._ramps, state["ramps"], strict=True):
            ramp.load_state_dict(saved)
        self._before = state["batch"]

    def _follow(self, trainer: Any, optimizer: Any, ramp: Ramp) -> ScaledSteps:
        def factor() -> float:
            self._factor = ramp.factor
            return ramp.factor

        def stepped() -> None:
            ramp.advance(1.0 / self._steps_per_epoch(trainer) if self.warmup_epochs else 1.0)

        return ScaledSteps(optimizer, factor, stepped, "LargeBatchLR")

    def _aim(self, trainer: Any) -> None:
        """Look at the batch, and tell rank zero's user if it is new."""
        size, accumulation = self._batch_size(trainer), trainer.accumulate_grad_batches
        ranks = _ranks(trainer)
        batch = size * accumulation * ranks
        if batch == self._batch:
            return
        before, self._before, self._batch = self._before, batch, batch
        ratio = batch / self.base_batch
        target = float(RULES[self.rule](ratio) if isinstance(self.rule, str) else self.rule(ratio))
        if not 0 < target < math.inf:
            raise ValueError(f"LargeBatchLR: rule must give a positive factor, got {target} for {ratio:g} base batches")
        for ramp in self._ramps:
            ramp.aim(target)
        if trainer.is_global_zero:
            rule = self.rule if isinstance(self.rule, str) else getattr(self.rule, "__name__", "a rule of its own")
            changed = f" (it was {before})" if before not in (None, batch) else ""
            rich.get_console().print(
                f"LargeBatchLR: {size} examples x {accumulation} accumulated x {ranks} ranks = batch {batch}{changed},"
                f" {ratio:g} x the base batch {self.base_batch}: learning rates x {target:.4g} ({rule})"
                + self._warmup(self._ramps[0].factor, target),
                highlight=False,
            )

    def _warmup(self, now: float, target: float) -> str:
        if now == target:
            return ""
        length = f"{self.warmup_steps} steps" if self.warmup_steps else f"{self.warmup_epochs:g} epochs"
        return f", from x {now:.4g} within {length}"

    def _batch_size(self, trainer: Any) -> int:
        if self.batch_size is not None:
            return self.batch_size
        loaders = tree_leaves(trainer.train_dataloader)
        sizes = [_loader_batch_size(loader) for loader in loaders]
        if len(sizes) != 1 or sizes[0] is None:
            raise ValueError(
                f"LargeBatchLR: expected one training loader that knows its batch size, got {len(loaders)} with"
                f" {sizes}: pass batch_size="
            )
        return sizes[0]

    def _steps_per_epoch(self, trainer: Any) -> int:
        batches = trainer.num_training_batches
        if math.isinf(batches):
            raise ValueError(
                "LargeBatchLR: expected a loader with a length for warmup_epochs, got none: use warmup_steps"
            )
        return max(1, math.ceil(batches / trainer.accumulate_grad_batches))


def _ranks(trainer: Any) -> int:
    """How many ranks have data of their own."""
    sampler: Mapping[str, Any] | None = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler["num_replicas"]) if sampler else int(trainer.world_size)


def _loader_batch_size(loader: Any) -> int | None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
