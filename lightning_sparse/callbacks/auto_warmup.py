"""AutoWarmup: finds the learning rate while training, by letting it grow until the loss has its minimum behind it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.callbacks.rates import bare_optimizer, check_alone
from lightning_sparse.optim.adascale import AdaScale
from lightning_sparse.optim.warmup import LEAST, Warmup, check_warmup

log = logging.getLogger(__name__)


class AutoWarmupRule:
    """Lets the learning rate grow exponentially until the loss minimum is past, then lets it fall along a cosine.

    Every ``test_every`` steps a Gaussian process is fitted to the training losses so far, averaged over ranks. When
    ``patience`` tests in a row are sure that the loss was lower before, the rate goes back to the one at the lowest
    point, and falls from there to zero. Rank 0 decides and tells the others, so the rate is the same on all of them.
    The rates of parameter groups keep the ratios that they have in ``configure_optimizers``; the largest one follows
    ``lr_min`` and ``lr_max``. Works with automatic optimization, any optimizer and any strategy, and without scheduler.

    Every test averages the losses since the last one, 4 bytes a step, in one small all-reduce. Losses that are not
    finite are left out; a run of them at the end counts as a loss far above the first ones. A test takes 10 losses: a
    run that has fewer while the rate grows gets the rate of the lowest one, and a warning. Logs ``autowarmup/lr`` and
    ``autowarmup/confidence`` at the Trainer's ``log_every_n_steps``.

    Args:
        lr_min, lr_max: of the growth.
        growth: share of the steps after which the rate would reach ``lr_max``, and the search ends in any case.
        test_every: steps between two tests; None takes one in 120 of the run.
        confidence: in [0.5, 1), above which a test says that the loss was lower before.
        patience: tests in a row that must say so.
        cooldown: share of the steps, at the end, in which the rate falls; until then it stays. 1 lets it fall at once.
        total_steps: of the run; None asks the Trainer.

    Raises:
        ValueError: an argument is out of range, or when training starts: the number of steps is unknown, a scheduler or
            another callback rules the learning rate, or optimization is manual.

    Source: Kim et al., "Automated Learning Rate Scheduler for Large-batch Training", 2021,
        https://arxiv.org/abs/2107.05855. The process is fitted by its exact likelihood here, and losses of a diverged
        run are capped.

    Example:
        >>> from lightning_sparse.callbacks import AutoWarmup
        >>> AutoWarmup(lr_max=0.5, test_every=10).lr
        1e-05
    """

    owns_learning_rate = True

    def __init__(
        self,
        lr_min: float = 1e-5,
        lr_max: float = 1.0,
        growth: float = 0.5,
        test_every: int | None = None,
        confidence: float = 0.95,
        patience: int = 3,
        cooldown: float = 1.0,
        total_steps: int | None = None,
    ) -> None:
        check_warmup(lr_min, lr_max, growth, confidence, patience, cooldown)
        for name, value in (("test_every", test_every), ("total_steps", total_steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"AutoWarmup: {name} must be an integer of at least 1 or None, got {value!r}")
        self._options = (lr_min, lr_max, growth, confidence, patience, cooldown)
        self._test_every, self._total_steps = test_every, total_steps
        self.steps = 0
        self.lr = lr_min
        """The largest learning rate of a group, for the coming step."""
        self.warmup: Warmup | None = None
        """Its ``end`` is the step from which on the rate grows no more, its ``peak`` the rate found."""
        self._ratios: list[float] = []
        self._confidence = 0.0
        self._loaded: Mapping[str, Any] | None = None
        self._trainer: Any = None
        self._optimizer: Any = None
        self._pending: list[Tensor] = []
        self._sum: Tensor | None = None
        self._passes = self._seen = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.warmup = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        check_alone(self, trainer.callbacks)
        optimizer = bare_optimizer(trainer, "AutoWarmup")
        if isinstance(optimizer, AdaScale):
            raise ValueError(
                "AutoWarmup: expected an optimizer without AdaScale, got one: both change the learning rate for the"
                " larger batch; keep one of them"
            )
        if trainer.lr_scheduler_configs:
            name = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                f"AutoWarmup: expected no scheduler, as it is one itself, got {name}: return the optimizer alone"
            )
        total = self._total_steps or trainer.estimated_stepping_batches
        if not 1 <= total < math.inf:
            raise ValueError(
                f"AutoWarmup: expected a known number of steps, got {total}: pass total_steps, or max_steps"
            )
        self._trainer, self._optimizer = trainer, optimizer
        self._every = self._test_every or max(1, int(total) // 120)
        self.warmup = Warmup(int(total), *self._options)
        self.steps, self._ratios, self._pending, self._sum, self._passes = 0, [], [], None, 0
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._ratios = [rate / max(rates) for rate in rates] if max(rates) > 0 else [1.0] * len(rates)
        state, self._loaded = self._loaded, None
        if state is not None:
            self.steps, self._ratios = int(state["steps"]), list(state["ratios"])
            self.warmup.load_state_dict(state["warmup"])
            # what an interrupted run had not averaged is left out
            missing = self.steps - len(self.warmup.losses) if self.warmup.end is None else 0
            self.warmup.losses += [math.nan] * missing
        self._check_length(trainer)
        self._seen = trainer.global_step
        self._set_rates()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.warmup is None or self._optimizer is None:
            return
        self._collect(outputs, trainer.accumulate_grad_batches)
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        self.steps += 1
        if self.warmup.end is None and (self.steps % self._every == 0 or self.steps >= self.warmup.last_growing):
            self._test(trainer)
        self._set_rates()
        if trainer.global_step % trainer.log_every_n_steps == 0 or trainer.fast_dev_run:
            for name, value in (("lr", self.lr), ("confidence", self._confidence)):
                pl_module.log(f"autowarmup/{name}", value, on_step=True, on_epoch=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._trainer = self._optimizer = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # what a test or a validation has loaded is not for the next fit
        self._trainer = self._optimizer = self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it, unless training ends with an exception: what is pending is averaged first."""
        if self._loaded is not None:
            # finders of rates and batches save and load before training starts
            return dict(self._loaded)
        if self.warmup is None:
            return {}
        if self._trainer is not None and not self._trainer.interrupted:
            self._average()
        return {"steps": self.steps, "ratios": list(self._ratios), "warmup": self.warmup.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # of use when the number of steps is known
        self._loaded = state_dict or None

    def _collect(self, outputs: Any, divided_by: int) -> None:
        """Add a pass's loss, which Lightning has divided; behind a step it becomes that step's."""
        if self.warmup is None or self.warmup.end is not None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        loss = loss.detach().float() if isinstance(loss, Tensor) else torch.tensor(math.nan)
        self._sum = loss if self._sum is None else self._sum + loss
        self._passes += 1
        if self._trainer.global_step != self._seen:
            self._pending.append(self._sum * (divided_by / self._passes))
            self._sum, self._passes = None, 0

    def _average(self) -> None:
        """Average what is pending over ranks: each loss alone, so it makes no difference when."""
        pending, self._pending = self._pending, []
        if pending and self.warmup is not None:
            device = self._trainer.strategy.root_device
            losses = torch.stack([loss.to(device) for loss in pending])
            self.warmup.losses += self._trainer.strategy.reduce(losses, reduce_op="mean").tolist()

    def _test(self, trainer: Any) -> None:
        self._average()
        assert self.warmup is not None
        verdict = trainer.strategy.broadcast(self.warmup.test() if trainer.is_global_zero else None)
        self._confidence = verdict.confidence
        if self.warmup.decide(verdict) and trainer.is_global_zero:
            log.info(f"AutoWarmup: learning rate {self.warmup.peak:.3g} from step {self.steps} on")
            if not verdict.has_evidence:
                log.warning(
                    f"AutoWarmup: expected at least {LEAST} finite losses while the rate grew, got fewer, so that the"
                    " learning rate is that of the lowest one and untested: train longer, or look at the loss"
                )

    def _check_length(self, trainer: Any) -> None:
        """Warn if growth ends before a test can be made."""
        assert self.warmup is not None
        growing = max(self.warmup.last_growing, len(self.warmup.losses))
        if self.warmup.end is None and growing < LEAST and trainer.is_global_zero:
            log.warning(
                f"AutoWarmup: expected at least {LEAST} steps in which the rate grows, got {growing} of"
                f" {self.warmup.total_steps} with growth={self._options[2]}, too few for a test: train longer, raise"
                " growth, or set the rate yourself"
            )

    def _set_rates(self) -> None:
        assert self.warmup is not None
        groups = self._optimizer.param_groups
        # groups that the optimizer has got since come with rates of their own
        self._ratios += [float(group["lr"]) / (self.lr or 1.0) for group in groups[len(self._ratios) :]]
        self.lr = self.warmup.rate(self.steps)
        for group, ratio in zip(groups, self._ratios, strict=True):
            if isinstance(rate := group["lr"], Tensor):
                rate.fill_(self.lr * ratio)
            else:
                group["lr"] = self.lr * ratio
