"""What a rank of `bench network` runs: trainings that standard input asks for, one JSON line each."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import queue
import sys
import threading
import traceback
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_sparse.bench.baselines import HookedDDP
from lightning_sparse.bench.contenders import BOUND, CONTENDERS
from lightning_sparse.bench.problems import make_problem
from lightning_sparse.bench.stopwatch import Stopwatch
from lightning_sparse.checksum import ranks_equal

Task = dict[str, Any]


def main() -> None:
    """Join the others, then train once for each task, until the input ends; results leave through standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # whatever a library prints must not pass for a result
    os.dup2(2, 1)
    _be_quiet()
    rank, world_size = int(os.environ["NODE_RANK"]), int(os.environ["BENCH_HOSTS"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tasks: queue.Queue[Task] = queue.Queue()
    threading.Thread(target=_read, args=(tasks,), daemon=True).start()

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        say(ready=True)
        while True:
            task = tasks.get()
            say(result=train(task, rank, world_size, lambda: say(step=True)))
            # a Trainer is full of cycles, and holds the weights of one training
            gc.collect()
    except BaseException as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}")
        # other ranks may never come to a collective that an orderly end waits for
        os._exit(1)


def train(task: Task, rank: int, world_size: int, tick: Any) -> dict[str, Any]:
    """One training; every rank calls it. Laps, the validation curve and the number of parameters.

    Raises:
        RuntimeError: a hook was not called, losses are not finite, or ranks differ when they should not.
    """
    name, steps = task["strategy"], task["steps"]
    problem = make_problem(task["model"], task["options"], steps, world_size)
    strategy = CONTENDERS[name]()
    watch = Stopwatch(task["interface"], tick)
    validates = task["model"] == "lm"
    alone = name == BOUND
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=1 if alone else world_size,
        max_steps=steps,
        val_check_interval=task["validate_every"] if validates else None,
        check_val_every_n_epoch=None if validates else 1,
        limit_val_batches=None if validates else 0,
        gradient_clip_val=problem.clip,
        callbacks=[watch],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    # ranks that make their data at different speeds begin together
    dist.barrier()
    trainer.fit(problem.module, problem.train, problem.val if validates else None)
    _check(name, strategy, problem.module, watch, steps)
    parameters = sum(p.numel() for p in problem.module.parameters() if p.requires_grad)
    return {"laps": watch.laps, "curve": watch.curve, "parameters": parameters}


def _check(name: str, strategy: Any, module: pl.LightningModule, watch: Stopwatch, steps: int) -> None:
    if len(watch.laps) != steps:
        raise RuntimeError(f"{name}: expected {steps} steps, got {len(watch.laps)}")
    if not all(map(math.isfinite, watch.losses)):
        raise RuntimeError(f"{name}: expected finite losses, got {watch.losses[-1]} in the end")
    if isinstance(strategy, HookedDDP):
        strategy.check(steps)
    equal = ranks_equal(module)
    if not equal and name != BOUND:
        raise RuntimeError(f"{name}: expected equal weights on all ranks after training, got others")


def _read(tasks: queue.Queue[Task]) -> None:
    for line in sys.stdin:
        tasks.put(json.loads(line))
    # whoever started us is gone, and a collective may wait for ever
    os._exit(0)


def _be_quiet() -> None:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
