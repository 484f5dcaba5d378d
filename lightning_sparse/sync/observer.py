"""Observer: looks at the gradients of a job on both sides of its exchange."""

from __future__ import annotations

from typing import Protocol

from lightning_sparse.job import Job, Outcome


class Observer(Protocol):
    """Changes nothing of what it sees, and takes no part in an exchange while one is seen."""

    def before(self, job: Job) -> None:
        """This rank's own gradients, unscaled and accumulated over passes, in the training loop."""

    def after(self, outcome: Outcome) -> None:
        """The same tensors hold what replaces the gradients, unscaled, equal on all ranks. On the worker."""
