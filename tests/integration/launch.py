"""Runs a script that Lightning starts on several ranks, so that no rank outlives it and errors are seen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse.communicators import ProcessGroup

ROOT = Path(__file__).parents[2]


def run_ranks(script: Path, *arguments: str, cwd: Path, timeout: float, launcher: Sequence[str] = ()) -> str:
    """Run ``script`` in a session of its own and return its output; all its ranks have ended afterwards.

    Args:
        launcher: what Python runs instead, with the script behind it, such as ``-m torch.distributed.run``.

    Raises:
        AssertionError: it failed, or took longer than ``timeout`` seconds; the message ends with its output.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    env.pop("TRITON_INTERPRET", None)
    # a file and not a pipe: a rank that hangs would keep the pipe open after the first has failed
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, *launcher, str(script), *arguments]
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"still running after {timeout} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        text = out.read()
    assert code == 0, f"{script.name}: {code}\n{text[-6000:]}"
    return text


def leave(path: Path, results: object) -> None:
    """Write what a rank saw, wait for the others, and give the process group up: the last thing of a script."""
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


def run_checks(checks: Iterable[Callable[[ProcessGroup], Any]], rank: int, world_size: int, folder: str) -> None:
    """What a spawned rank does: every check with one transport, and its results into a file of this rank's."""
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    transport = ProcessGroup()
    results = {check.__name__: check(transport) for check in checks}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    transport.close()
    dist.destroy_process_group()
