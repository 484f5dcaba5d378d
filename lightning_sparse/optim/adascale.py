"""AdaScale: an optimizer whose learning rate follows what a larger batch is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.optim.gain import Gain, check_scale
from lightning_sparse.optim.norms import Passes, group_squares
from lightning_sparse.optim.rates import Borrowed

Average = Callable[[Tensor], Tensor]
"""The mean over ranks of a small float32 vector; the same bits on every rank."""


class AdaScale(Optimizer):
    """Steps another optimizer with ``lr * gain ** power``, each parameter group with its own gain.

    Keep the learning rate and the schedule of the base batch: step schedulers to ``int(optimizer.gain.steps)`` and stop
    when that reaches the number of steps meant for the base batch. Under a Trainer, ``AdaScaleLR`` does all of it. In a
    loop of your own, call ``observe_pass`` behind every backward pass and before gradients are averaged over ranks;
    ``observe_mean`` behind that, if gradients are clipped; then ``step`` and ``zero_grad``. It makes no difference
    whether losses are divided by ``passes``; a step of fewer, as at the end of an epoch, counts as its share of them.
    Put it around any sharding of optimizer states, not inside.

    Args:
        optimizer: is stepped; ``param_groups``, ``state`` and ``defaults`` stay its own.
        passes: backward passes that a step accumulates.
        world_size: ranks whose gradients are averaged; ``passes * world_size`` must be at least 2.
        average: mean over ranks, for more than one of them.
        scale: the batch of a step over the base batch; None takes ``passes * world_size``.
        smoothing: of the estimates, see ``Gain``.
        power: 1 is the paper's, for SGD with or without momentum. Optimizers that divide by the root mean square of the
            gradient, such as Adam, are outside of its theory; 0.5 gives them the square-root rule where noise rules.

    Raises:
        ValueError: one micro-batch a step, a scale that is not above 1, several ranks without ``average``.

    Source: Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML 2020,
        https://proceedings.mlr.press/v119/johnson20a.html, Algorithm 1.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AdaScale(torch.optim.SGD([weight], lr=0.5), passes=2)
        >>> for row in torch.eye(2):
        ...     (weight * row).sum().backward()
        ...     optimizer.observe_pass()
        >>> optimizer.step()
        >>> optimizer.gain.value  # orthogonal gradients: two small steps in one
        2.0
        >>> weight.tolist(), optimizer.param_groups[0]["lr"]
        ([0.0, 0.0], 0.5)
    """

    owns_learning_rate = True

    def __init__(
        self,
        optimizer: Optimizer,
        passes: int = 1,
        world_size: int = 1,
        average: Average | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        power: float = 1.0,
    ) -> None:
        if isinstance(optimizer, AdaScale) or not isinstance(optimizer, Optimizer):
            raise TypeError(f"AdaScale: expected an optimizer such as SGD to wrap, got {type(optimizer).__name__}")
        if world_size > 1 and average is None:
            raise ValueError(f"AdaScale: expected average= for {world_size} ranks, got None: pass the mean over ranks")
        check_power(power)
        micro_batches = passes * world_size
        scale = micro_batches if scale is None else scale
        check_scale(scale, micro_batches, smoothing)
        self.inner = optimizer
        self.gain = Gain(len(optimizer.param_groups), scale, micro_batches, smoothing)
        self.power = power
        self.driven = False
        """Whether somebody else, such as ``AdaScaleLR``, keeps ``gain`` up to date."""
        self._world_size = world_size
        self._average: Average = average if average is not None else _of_one_rank
        self._passes = Passes()
        self._mean: Tensor | None = None
        self._rates = Borrowed()
        # the hooks of an Optimizer; parameters are the other one's
        super().__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        # torch's holds what is the other optimizer's; what a scheduler has put here is bound to this one
        attached = ("step", "_opt_called")
        own = {k: x for k, x in self.__dict__.items() if k not in attached and not k.startswith("_optimizer_")}
        # copies of parameters have no gradients, so a copy begins its step anew
        return {**own, "_passes": Passes(), "_mean": None}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def observe_pass(self, loss_scale: float = 1.0) -> None:
        """Behind a backward pass: look at what it has added. ``loss_scale`` is the factor on the gradients now."""
        self._passes.add(self.param_groups, loss_scale)

    @torch.no_grad()
    def observe_mean(self, loss_scale: float = 1.0) -> None:
        """Behind the average over ranks, before clipping: look at the gradient that the step will take."""
        self._mean = group_squares(self.param_groups) / loss_scale**2

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Bring the gain up to date, and step. With more than one rank, every rank calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        share = 0.0 if self.driven else self._take_up()
        factors = [self.gain.of_group(at) ** self.power for at in range(len(self.param_groups))]
        self._rates.multiply(self.param_groups, factors)
        try:
            self.inner.step()
        finally:
            self._rates.give_back()
        self.gain.advance(share * self.gain.value)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the other optimizer; what was observed of a step that was not made is forgotten."""
        self.inner.zero_grad(set_to_none)
        self._passes.take()
        self._mean = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        self.gain.grow(len(self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """The other optimizer's, with the gain under ``"adascale"``."""
        self.gain.grow(len(self.param_groups))
        return {**self.inner.state_dict(), "adascale": self.gain.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of this class, or of the other optimizer alone."""
        state = dict(state_dict)
        gain = state.pop("adascale", None)
        self.inner.load_state_dict(state)
        if gain is not None:
            self.gain.load_state_dict(gain)

    def _take_up(self) -> float:
        """Bring the gain up to date; the share of a whole step's passes that this one has, 0 if one is not finite."""
        each, count = self._passes.take()
        if not count:
            raise RuntimeError(
                "AdaScale: expected observe_pass() behind every backward pass of a step, got none: call it, or add the"
                " callback AdaScaleLR to the Trainer"
            )
        if self._mean is None:
            self.observe_mean()
        assert self._mean is not None
        # in units of what a pass adds, so that sums and means of passes give the same gain
        mean, self._mean = self._mean.to(each.device) / count**2, None
        both = torch.cat([each, mean])
        averaged = self._average(both.float() if self._world_size > 1 else both).tolist()
        groups = len(self.param_groups)
        self.gain.grow(groups)
        samples = count * self._world_size
        if not self.gain.update(averaged[:groups], averaged[groups:], samples):
            return 0.0
        return min(1.0, samples / self.gain.micro_batches)


def _of_one_rank(buffer: Tensor) -> Tensor:
    return buffer


def check_power(power: float) -> None:
    """Raise ValueError unless it is an exponent for the gain."""
    if not 0 < power <= 1:
        raise ValueError(f"AdaScale: power must be in (0, 1], got {power!r}: 1 for SGD, 0.5 for Adam and its like")
