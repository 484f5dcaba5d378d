"""SparseDDP: what both Lightning trees' SparseDDPStrategy have in common; connects a tap and its reducer to a run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_sparse.arguments import (
    check_ddp_options,
    check_flag,
    check_on_nonfinite,
    check_optimizers,
    check_parameters,
    check_parts,
    check_ranks_agree,
    check_unused,
)
from lightning_sparse.change_over import ChangeOver
from lightning_sparse.checkpoint import check_kind, load, save
from lightning_sparse.checkpoint_checks import KEY
from lightning_sparse.communicators.process_group import destroy_at_exit
from lightning_sparse.connection import Connection, Plan
from lightning_sparse.defaults import choose_exchange, choose_parts
from lightning_sparse.protocols import Codec, Communicator, Compressor, Memory, Schedule, Stepped
from lightning_sparse.reducer import Reducer
from lightning_sparse.summary import summarise
from lightning_sparse.sync import Gradients, Updates
from lightning_sparse.sync.alone import Alone
from lightning_sparse.sync.gradients import GradientsTap
from lightning_sparse.sync.steps import Steps
from lightning_sparse.sync.updates_tap import UpdatesTap

log = logging.getLogger(__name__)


class SparseDDP(ChangeOver):
    """Data-parallel training over a sparse exchange; mixed into each Lightning tree's ``DDPStrategy``.

    Args:
        density: fraction of the large parameters' entries that each rank sends per exchange, in (0, 1], or a schedule
            from step to fraction. 1 is a plain dense all-reduce, unless the codec carries blocks. Default: 0.25 where
            ranks agree on the entries, 0.01 where each picks its own. ``"auto"`` begins there, measures, and takes the
            largest density, and where ranks agree the most bits, whose exchange takes a tenth of the computation's
            time, or all of it where it runs beside it; lighter ones if need be.
        exchange: ``"auto"`` (``Updates()``, or ``Gradients()`` if a memory is given), or one of the two with its
            options.
        compressor: which entries; default ``WeightBlocks()`` with ``Updates``, and ``TopK()`` with ``Gradients`` or if
            only a density is given.
        memory: what happens to the rest, for ``Gradients``; default ``Residual()``. ``Updates`` has no use for one.
        codec: which bytes; default ``Quantized(1)`` where ranks agree on the entries, ``Raw()`` otherwise.
        communicator: how ranks average; default ``CompressedAllReduce()`` where ranks agree, ``AllGather()`` otherwise.
        seed: of the counter-based draws that sampling uses.
        residual_checkpoint: what checkpoints hold of what was not sent yet: ``"mean"``, one tensor of the model's size,
            good for any number of ranks; ``"exact"``, the state of every rank, optimizers and generators included, so
            that as many ranks go on as if they had never stopped; ``"none"``.
        on_nonfinite: where gradients are NaN or inf and no loss scaler looks after that: ``"skip"`` the step, on every
            rank with ``Gradients``, on the rank it happened to with ``Updates``; or ``"raise"`` on every rank.
        debug: compare, before every collective, what each rank is about to do, and every 100 steps what must be
            bit-equal on all of them; errors name the first that differs. Costs one small message per collective.
        guard: find out after 50 steps, and from time to time later, whether plain DDP would be faster, and change
            over to it if it is; a short trial decides. Not where ``Updates`` meets several optimizers, manual
            optimization or a loss scaler. False: always exchange as asked for, and alike in every run.
        **kwargs: everything ``DDPStrategy`` takes, except another communication hook or model averaging.

    Raises:
        ValueError, TypeError: on any argument out of range or of the wrong kind, before ranks talk to each other.

    Example:
        >>> from lightning_sparse import SparseDDPStrategy, Updates
        >>> strategy = SparseDDPStrategy(density=0.01, exchange=Updates(every=2))
        >>> strategy.summary()
        {}
    """

    _tree: str

    def __init__(
        self,
        density: float | Schedule | str | None = None,
        exchange: str | Gradients | Updates = "auto",
        compressor: Compressor | None = None,
        memory: Memory | None = None,
        codec: Codec | None = None,
        communicator: Communicator | None = None,
        seed: int = 0,
        residual_checkpoint: str = "mean",
        on_nonfinite: str = "skip",
        debug: bool = False,
        guard: bool = True,
        **kwargs: Any,
    ) -> None:
        check_kind(residual_checkpoint)
        check_on_nonfinite(on_nonfinite)
        check_flag("debug", debug)
        check_flag("guard", guard)
        check_parts(density, exchange, compressor, memory, codec, communicator)
        known = [name for name in inspect.signature(super().__init__).parameters if name != "kwargs"]
        check_ddp_options(kwargs, known)
        super().__init__(**kwargs)
        chosen = choose_exchange(exchange, memory)
        parts = choose_parts(chosen, density, compressor, codec, communicator)
        check_unused(chosen, parts.codec, kwargs)
        self._plan = Plan(chosen, parts, memory, seed, debug)
        self._guarded = guard
        self._residual_checkpoint = residual_checkpoint
        self._on_nonfinite = on_nonfinite
        self._connection: Connection | None = None
        self._summary: dict[str, Any] = {}
        self._steps: Steps | None = None
        self._callbacks: list[Any] = []
        self._first: Any = None
        self._left: Any = None

    @property
    def tap(self) -> GradientsTap | UpdatesTap | None:
        """Where ``fit`` takes what is exchanged; None outside of ``fit``, and with ``Updates`` on one rank."""
        return self._connection.tap if self._connection is not None else None

    @property
    def reducer(self) -> Reducer | None:
        """Exchanges what the tap takes."""
        return self._connection.reducer if self._connection is not None else None

    def __repr__(self) -> str:
        # Lightning prints this when a Trainer of the other tree is given this strategy
        other = _OTHER[self._tree]
        return (
            f"<SparseDDPStrategy for {self._tree}.Trainer; for {other}.Trainer use"
            f" {_HOME[other]}.SparseDDPStrategy or strategy='sparse_ddp'>"
        )

    def configure_ddp(self) -> None:
        """Nothing yet: `setup` wraps the module, if the tap needs it, once the optimizers are there."""

    def setup(self, trainer: Any) -> None:
        """Set up as ``DDPStrategy`` does, then connect the tap to the optimizers."""
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        check_parameters(self._module)
        self._left = None
        super().setup(trainer)
        self._begin(trainer)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward, and raise what went wrong in the exchange beside it."""
        output = super().backward(closure_loss, *args, **kwargs)
        if self.tap is not None:
            self.tap.check()
        return output

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load weights; in the middle of training (the learning rate finder does that) nothing of before is owed."""
        super().load_model_state_dict(checkpoint, strict)
        if self.tap is not None:
            self.tap.restart()
            self._begin_to_measure()
            # of the training before this one
            self._left = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Add what ranks owe each other, unless only weights are saved, and write the file on rank 0."""
        if self.tap is not None and self.reducer is not None and "optimizer_states" in checkpoint:
            kind = self._residual_checkpoint
            if self._is_interrupted:
                kind = "none"
                if self.is_global_zero:
                    log.warning(
                        "sparse_ddp: saved while training ends with an exception, where other ranks may not come:"
                        " the file holds nothing of what ranks owe each other"
                    )
            checkpoint[KEY] = save(
                kind, self.tap, self.reducer, checkpoint["optimizer_states"], self.root_device, not self._is_interrupted
            )
        elif self._left is not None and "optimizer_states" in checkpoint:
            checkpoint[KEY] = self._left
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, except behind a checkpoint that is saved on the way out of an exception."""
        # other ranks may not come: stock DDP waits for them there until its timeout
        if name != "Trainer.save_checkpoint" or not self._is_interrupted:
            super().barrier(name)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load optimizer states, and what ranks owe each other."""
        load_states = super().load_optimizer_state_dict
        load_states(checkpoint)

        def take(own: Sequence[Mapping[str, Any]]) -> None:
            load_states({"optimizer_states": own})

        alone = self._connection is None and self.world_size == 1 and KEY in checkpoint
        connection = self._connect() if alone else self._connection
        if connection is not None:
            tap, reducer = connection.tap, connection.reducer
            try:
                load(checkpoint.get(KEY), tap, reducer, self._module, self.root_device, take)
            finally:
                if alone:
                    # what several ranks owed is in the weights now
                    connection.close()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer and tell the tap, also when a loss scaler skips the step."""
        if self._steps is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self._steps.announced(optimizer):
            result = super().optimizer_step(optimizer, self._steps.guarded(optimizer, closure), model, **kwargs)
        if self._connection is not None:
            self._connection.compare_ranks()
        if self._pace is not None and optimizer is self._bare_optimizers()[0] and self._pace.lap():
            self._change_over(self._pace.guard)
        return result

    def enter_shared(self) -> None:
        """Show what is equal on all ranks in the module. Every rank calls it."""
        if self.tap is not None:
            self.tap.enter_shared()

    def on_validation_end(self) -> None:
        """Return to this rank's own weights, after everybody else's hooks."""
        super().on_validation_end()
        if self.tap is not None:
            self.tap.leave_shared()

    def finish(self) -> None:
        """Training is over: the module keeps what is equal on all ranks. Every rank calls it."""
        if self.tap is not None:
            self.tap.finish()

    def on_train_end(self) -> None:
        """Agree again on weights that callbacks have replaced."""
        super().on_train_end()
        if isinstance(self.tap, UpdatesTap):
            # the learning rate finder trains without the Trainer's callbacks, ours included
            self.tap.finish()
            self.tap.settle()
        if self.tap is not None and self.reducer is not None:
            # a file written after `fit` has its counters from here
            self._left = save("none", self.tap, self.reducer, [], self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that go into checkpoints: equal on all ranks."""
        if not isinstance(self.tap, UpdatesTap):
            return super().lightning_module_state_dict()
        # while an exception is handled, other ranks may not come
        with self.tap.shared(together=not self._is_interrupted):
            state = super().lightning_module_state_dict()
            return {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in state.items()}

    def summary(self) -> dict[str, Any]:
        """What was exchanged in the last ``fit``, on this rank.

        Returns:
            ``exchange``, ``world_size``, ``density`` (achieved), ``steps``, ``bytes_per_step`` (sent + received by this
            rank, everything included), ``dense_bytes_per_step`` (what a ring all-reduce of the same float32 gradients
            moves), ``skipped`` (steps of this rank whose gradients were not finite), ``seconds`` (by stage, per step).
            ``guard`` (whether DDP took over, and what was measured: seconds of a ``step``, of its ``exchange``, of an
            ``all_reduce`` of all gradients, of a step with ``ddp_at_best``, and with ``ddp`` if tried). Empty before
            the first ``fit``, in the parent of spawned ranks, and where one rank has nothing to exchange.
        """
        if self.tap is None or self.reducer is None:
            return self._summary
        guard = self._pace.guard if self._pace is not None else None
        found = {"is_dense": guard.is_dense, **guard.measured} if guard is not None else {}
        return {**summarise(self.tap, self.reducer, self._module, self.skipped), "guard": found}

    def teardown(self) -> None:
        """Stop the worker, give the process group up, and tear down as ``DDPStrategy`` does."""
        if isinstance(self.tap, UpdatesTap):
            self.tap.abandon()
        if self._connection is not None:
            if self._left is None:
                # training ended early, and a second exception on the way out may have a file written again
                tap, reducer = self._connection.tap, self._connection.reducer
                self._left = save("none", tap, reducer, [], self.root_device, together=False)
            self._summary = self.summary()
            self._connection.close()
        if self._steps is not None:
            self._steps.close()
        if self._first in self._callbacks:
            self._callbacks.remove(self._first)
        self._callbacks, self._first, self._steps = [], None, None
        self._connection = None
        self._end_pace()
        super().teardown()
        destroy_at_exit()

    def on_exception(self, exception: BaseException) -> None:
        """As ``DDPStrategy``, but naming our strategies where it advises its own."""
        super().on_exception(exception)
        if exception.args and isinstance(exception.args[0], str):
            advice = exception.args[0].replace("'ddp_find_unused", "'sparse_ddp_find_unused")
            advice = advice.replace("strategy=DDPStrategy(", "strategy=SparseDDPStrategy(")
            exception.args = (advice, *exception.args[1:])

    @property
    def skipped(self) -> int:
        """Steps of this rank in this ``fit`` that were skipped, as gradients were not finite."""
        return self._steps.skipped if self._steps is not None else 0

    @property
    def _module(self) -> nn.Module:
        return self.lightning_module

    def _begin(self, trainer: Any) -> None:
        """Connect the tap to the optimizers, before the first step."""
        options = f"residual_checkpoint {self._residual_checkpoint!r}, on_nonfinite {self._on_nonfinite!r}"
        check_ranks_agree(f"{self._plan}, {options}, guard {self._guarded}", self._module)
        is_updates = isinstance(self._plan.exchange, Updates)
        if self.world_size == 1:
            log.info("sparse_ddp: one rank, nothing to exchange")
            if is_updates:
                super().configure_ddp()
                self._watch_steps(Alone())
                return
        check_optimizers(self._plan.exchange, self._bare_optimizers())
        self._connection = self._connect()
        if is_updates:
            self._callbacks, self._first = trainer.callbacks, self._first_callback()
            self._callbacks.insert(0, self._first)
        else:
            super().configure_ddp()
        self._watch_steps(self._connection.tap)
        self._begin_to_measure()
        if self.is_global_zero and self.world_size > 1:
            log.info(f"sparse_ddp: {self.world_size} ranks, {self._plan.exchange}, {self._plan.parts}")

    def _watch_steps(self, tap: Stepped) -> None:
        self._steps = Steps(tap, self._bare_optimizers(), self._on_nonfinite if self._scaler is None else None)

    def _begin_to_measure(self) -> None:
        assert self._steps is not None
        self._start_pace(self._steps, bool(self._plan.parts.rungs))

    @property
    def _is_interrupted(self) -> bool:
        """Whether the Trainer ends with an exception: other ranks may not come to a collective any more."""
        return bool(self.lightning_module.trainer.interrupted)

    def _connect(self) -> Connection:
        return Connection(
            self._plan,
            self._module,
            self._bare_optimizers(),
            self.root_device,
            self._timeout,
            self._process_group_backend,
            bool(self._ddp_kwargs.get("find_unused_parameters", False)),
            self._loss_scale,
        )

    def _bare_optimizers(self) -> list[Optimizer]:
        return [getattr(optimizer, "_optimizer", optimizer) for optimizer in self.optimizers]

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    def _loss_scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def _register_ddp_hooks(self) -> None:
        # DDPStrategy registers a hook on CUDA only, silently
        if isinstance(self.tap, GradientsTap):
            self.model.register_comm_hook(None, self.tap.hook)


_OTHER = {"pytorch_lightning": "lightning.pytorch", "lightning.pytorch": "pytorch_lightning"}
_HOME = {"pytorch_lightning": "lightning_sparse", "lightning.pytorch": "lightning_sparse.lightning"}
