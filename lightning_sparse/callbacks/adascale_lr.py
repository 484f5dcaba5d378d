"""AdaScaleLR: learning rates, schedulers and the last step follow what the larger batch is worth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lightning_sparse.callbacks.accumulation import accumulated, most_accumulated
from lightning_sparse.callbacks.norms import (
    Norms,
    OwnGradients,
    OwnPasses,
    Source,
    TappedGradients,
    parameter_names,
)
from lightning_sparse.callbacks.rates import bare_optimizer, check_alone
from lightning_sparse.callbacks.scaled_steps import ScaledSteps
from lightning_sparse.callbacks.step_schedulers import StepSchedulers
from lightning_sparse.optim.adascale import AdaScale, check_power
from lightning_sparse.optim.gain import Gain, check_scale
from lightning_sparse.strategy import SparseDDP
from lightning_sparse.sync.gradients import GradientsTap

log = logging.getLogger(__name__)


class AdaScaleRule:
    """Multiplies each group's learning rate by its gain, for every step, and counts steps by what they are worth.

    Keep learning rate, schedule and ``max_steps`` of the base batch, and train on more ranks or with more accumulation:
    a step counts as ``gain`` steps, between 1 and ``scale``, and one of fewer passes, as at the end of an epoch, as its
    share of them. Schedulers with ``interval="step"`` advance once in ``frequency`` whole scale-invariant steps, and
    training stops when ``steps`` of them are made. The gain of a step comes from the steps before it, so that nobody
    waits for norms; it is equal on all ranks. Works with automatic optimization and one optimizer, whether it is
    wrapped in ``AdaScale`` or not; clipping comes after the measurement. A rate that is set within a step
    (``on_before_optimizer_step``) goes without the gain, and is warned of.

    Several ranks need ``strategy="sparse_ddp"``, where each rank's gradient is seen before it is averaged. The mean is
    seen only if gradients are exchanged at density 1. Otherwise, and with ``Updates``, where no mean gradient is ever
    formed, its norm is estimated from random sketches, 2 kB a group and step, which compression does not touch; with
    ``Updates`` they are those of gradients at each rank's own weights. One rank needs accumulation, any strategy, and
    memory for one more copy of the gradients.

    Accumulation may change between epochs (``GradientAccumulationScheduler``), in both directions: the base batch stays
    that of the first epoch. A step of one micro-batch tells nothing of the noise, and goes by what is known.

    Logs, at the Trainer's ``log_every_n_steps``: ``adascale/gain``, ``adascale/variance`` (sigma^2, of a base batch),
    ``adascale/mean`` (mu^2), ``adascale/noise_scale`` (sigma^2 / mu^2, in base batches) and ``adascale/steps``.

    Args:
        scale: batch of one step, in the first epoch, over the base batch, above 1; None takes ranks times accumulated
            passes.
        steps: scale-invariant steps after which training stops; None takes the Trainer's ``max_steps``, if it has one.
        smoothing: of the estimates, see ``Gain``.
        power: of the gain on the learning rate; 1 is the paper's, for SGD, 0.5 the square-root rule for Adam. Scale
            (if none is given here) and power of an ``AdaScale`` that is there are kept.

    Raises:
        ValueError: when training starts, if there is never more than one micro-batch a step, several ranks under
            another strategy, manual optimization, or another callback that rules the learning rate.

    Source: Johnson et al., "AdaScale SGD", ICML 2020, https://proceedings.mlr.press/v119/johnson20a.html, Algorithm 1.

    Example:
        >>> from lightning_sparse.callbacks import AdaScaleLR
        >>> AdaScaleLR(scale=4).gain.value
        1.0
    """

    owns_learning_rate = True

    def __init__(
        self,
        scale: float | None = None,
        steps: int | None = None,
        smoothing: float | None = None,
        power: float = 1.0,
    ) -> None:
        check_power(power)
        check_scale(2 if scale is None else scale, 2, smoothing)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"AdaScaleLR: steps must be an integer of at least 1 or None, got {steps!r}")
        self.scale, self.steps, self.smoothing, self.power = scale, steps, smoothing, power
        self.gain = Gain(1, 2 if scale is None else scale, 2, smoothing)
        """What is known now; of the last ``fit`` behind it."""
        self._loaded: Mapping[str, Any] | None = None
        self._has_begun = False
        self._optimizer: Any = None
        self._scaled: ScaledSteps | None = None
        self._schedulers = StepSchedulers([], "AdaScaleLR")
        self._source: Source | None = None
        self._pending: Callable[[], Norms] | None = None
        self._last: int | None = None
        self._base, self._passes, self._accumulated = 1.0, 0, 1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._has_begun = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._release()
        check_alone(self, trainer.callbacks)
        optimizer = bare_optimizer(trainer, "AdaScaleLR")
        self._schedulers = StepSchedulers(trainer.lr_scheduler_configs, "AdaScaleLR")
        self._optimizer = optimizer
        self._passes, self._accumulated = 0, accumulated(trainer, trainer.current_epoch)
        wrapper = optimizer.gain if isinstance(optimizer, AdaScale) else None
        self._base = 1.0 if wrapper is None else wrapper.micro_batches / wrapper.scale
        if self.scale is not None:
            # also where a run resumes in a later epoch
            self._base = trainer.world_size * accumulated(trainer, 0) / self.scale
        most = trainer.world_size * most_accumulated(trainer)
        check_scale(most / self._base, most, None)
        self._take_gain(self._make_gain(trainer), self._loaded)
        self._loaded, self._has_begun = None, True
        self._source = self._find_source(trainer, pl_module)
        if isinstance(optimizer, AdaScale):
            optimizer.driven = True
        else:
            self._scaled = ScaledSteps(optimizer, self._factors, lambda: None, "AdaScaleLR")
        self._last = self.steps if self.steps is not None else trainer.max_steps if trainer.max_steps > 0 else None
        trainer.should_stop |= self._is_over()
        if trainer.is_global_zero:
            log.info(
                f"AdaScaleLR: {self.gain.micro_batches} micro-batches a step, scale {self.gain.scale:g}, stops after"
                f" {self._last} scale-invariant steps, noise from {self._source.how}"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._scaled is not None:
            # of a step that was left by an exception which somebody has caught
            self._scaled.restore()
        if self._source is not None and trainer.accumulate_grad_batches != self._accumulated:
            # a scheduler of the accumulation: the base batch stays what it was
            self._accumulated = trainer.accumulate_grad_batches
            self.gain.grow(len(self._optimizer.param_groups))
            self._take_gain(self._make_gain(trainer), self.gain.state_dict())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._source is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._source.behind_backward(float(scaler.get_scale()) if scaler is not None else 1.0)
            self._passes += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._source is not None:
            passes, self._passes = self._passes, 0
            self._pending = self._source.before_step(passes, self._accumulated)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        norms, worth = pending(), self.gain.value
        self.gain.grow(len(norms.each))
        if self.gain.update(norms.each, norms.mean, norms.samples, norms.passes):
            # Lightning divides losses by the passes of a whole step: a gradient of fewer is shorter
            self.gain.advance(worth * norms.samples * norms.passes / self.gain.micro_batches)
        self._drive(pl_module)
        trainer.should_stop |= self._is_over()
        if trainer.global_step % trainer.log_every_n_steps == 0 or trainer.fast_dev_run:
            for name, value in self._figures().items():
                pl_module.log(f"adascale/{name}", value, on_step=True, on_epoch=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._release()
        # for a test or a validation: not for the next fit
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Of the training, or what it will begin with: finders of rates and batches save and load before it starts."""
        if self._loaded is not None:
            return dict(self._loaded)
        if self._optimizer is not None:
            self.gain.grow(len(self._optimizer.param_groups))
        return self.gain.state_dict() if self._has_begun else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # of use when the number of ranks and passes is known
        self._loaded = state_dict

    def _make_gain(self, trainer: Any) -> Gain:
        micro_batches = trainer.world_size * self._accumulated
        return Gain(len(self._optimizer.param_groups), micro_batches / self._base, micro_batches, self.smoothing)

    def _take_gain(self, gain: Gain, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            gain.load_state_dict(state)
        self.gain = gain
        if isinstance(self._optimizer, AdaScale):
            self._optimizer.gain = gain

    def _find_source(self, trainer: Any, pl_module: Any) -> Source:
        optimizer, strategy = self._optimizer, trainer.strategy
        if trainer.world_size == 1:
            return OwnPasses(lambda: optimizer.param_groups)
        if not isinstance(strategy, SparseDDP) or strategy.tap is None or strategy.reducer is None:
            raise ValueError(
                f"AdaScaleLR: expected strategy='sparse_ddp' on {trainer.world_size} ranks, got"
                f" {type(strategy).__name__}, which shows no rank's own gradient: SparseDDPStrategy(density=1,"
                " exchange=Gradients()) is DDP bit for bit"
            )
        if isinstance(strategy.tap, GradientsTap):
            names = parameter_names(pl_module)
            return TappedGradients(lambda: optimizer.param_groups, names, strategy.tap, strategy.reducer)
        return OwnGradients(lambda: optimizer.param_groups, strategy.tap, strategy.reducer)

    def _factors(self) -> list[float]:
        groups = len(self._optimizer.param_groups)
        self.gain.grow(groups)
        return [self.gain.of_group(at) ** self.power for at in range(groups)]

    def _drive(self, pl_module: Any) -> None:
        """Step schedulers to the scale-invariant steps that were made."""
        made = int(self.gain.steps) if self._last is None else min(int(self.gain.steps), self._last)
        self._schedulers.follow(made, pl_module.lr_scheduler_step)

    def _is_over(self) -> bool:
        return self._last is not None and self.gain.steps >= self._last

    def _figures(self) -> dict[str, float]:
        gain = self.gain
        return {
            "gain": gain.value,
            "variance": gain.variance,
            "mean": gain.mean,
            "noise_scale": gain.noise_scale,
            "steps": gain.steps,
        }

    def _release(self) -> None:
        """Let go of the run: what is left can be read, pickled and used for the next one."""
        if self._scaled is not None:
            self._scaled.close()
        if isinstance(self._optimizer, AdaScale):
            self._optimizer.driven = False
        self._schedulers.release()
        self._optimizer = self._scaled = self._source = self._pending = self._last = None
