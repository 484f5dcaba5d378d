"""Runs a script that Lightning starts on several ranks, so that no rank outlives it and errors are seen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
