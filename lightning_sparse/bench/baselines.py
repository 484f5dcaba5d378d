"""DDP with torch's own hooks, registered on the CPU too, where Lightning leaves them out without a word."""

from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

# PowerSGD's first steps are dense; with a warm start it takes no fewer than these
POWER_SGD_START = 2


class HookedDDP(DDPStrategy):
    """DDP with a communication hook whose calls are counted."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = 0

    def check(self, steps: int) -> None:
        """Raise RuntimeError unless the hook has had a part in each of ``steps`` steps."""
        if self.calls < steps:
            raise RuntimeError(
                f"{type(self).__name__}: expected a call of its hook in each of {steps} steps, got {self.calls}"
            )

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    # annotations stay types: torch compares the one of `bucket`
    def _counted(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.calls += 1
        return self.hook(state, bucket)

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(self.make_state(), self._counted)  # type: ignore[operator, union-attr]

    def make_state(self) -> Any:
        """What the hook keeps; made once the process group is there."""
        return None


class HalfDDP(HookedDDP):
    """DDP that sends gradients as float16."""

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return fp16_compress_hook(state, bucket)


class PowerSGDDDP(HookedDDP):
    """DDP with PowerSGD of rank 4, in one bucket: with more, its collectives meet in different orders on gloo.

    Source: Vogels et al., "PowerSGD", https://arxiv.org/abs/1905.13727, as torch implements it.
    """

    def __init__(self) -> None:
        super().__init__(bucket_cap_mb=100_000)

    def check(self, steps: int) -> None:
        """As of any hook, and only one bucket a step."""
        super().check(steps)
        if self.calls != steps:
            raise RuntimeError(f"PowerSGDDDP: expected one bucket a step, got {self.calls} in {steps} steps")

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return powerSGD_hook(state, bucket)

    def make_state(self) -> Any:
        return PowerSGDState(
            process_group=None,
            matrix_approximation_rank=4,
            start_powerSGD_iter=POWER_SGD_START,
            # at 0 gradients that are all zero become NaN
            orthogonalization_epsilon=1e-8,
        )
