"""Ranks: one process on each host, told what to train; none of them outlives the bench."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from lightning_sparse.bench.hosts import Hosts, Loopback

_ROOT = Path(__file__).parents[2]
_MASTER_PORT = 29500
_TAIL = 3000  # characters of a failed rank's output


class RankError(RuntimeError):
    """A rank has raised or died; the message holds the end of its output."""


class Ranks:
    """One rank a host, joined over gloo; a context manager.

    Each rank is a process that trains once for every task. It ends when its standard input does, so that it ends with
    this process whatever happens to that.

    Args:
        hosts: where the ranks run, and what joins them.
        threads: of torch, on each rank.

    Raises:
        RankError: a rank does not come up.
    """

    def __init__(self, hosts: Hosts | Loopback, threads: int) -> None:
        self._hosts = hosts
        self._processes: list[subprocess.Popen[str]] = []
        self._outputs: list[IO[str]] = []
        self._files = ExitStack()
        self._messages: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        try:
            port = str(_free_port() if hosts.is_loopback else _MASTER_PORT)
            for host in range(hosts.count):
                self._start(host, port, threads)
            self._gather("ready", lambda: None)
        except BaseException:
            self.close()
            raise

    def run(self, task: dict[str, Any], tick: Callable[[], None]) -> list[dict[str, Any]]:
        """Train once on all ranks; their results in rank order.

        Args:
            tick: called after each step of rank 0.

        Raises:
            RankError: a rank has failed; the others are of no use any more.
        """
        for process in self._processes:
            assert process.stdin is not None
            # a rank that has died is reported below, with its output
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
        return self._gather("result", tick)

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._files.close()
        self._processes.clear()
        self._outputs.clear()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, host: int, port: str, threads: int) -> None:
        env = {
            **os.environ,
            "MASTER_ADDR": self._hosts.address(0),
            "MASTER_PORT": port,
            "NODE_RANK": str(host),
            "LOCAL_RANK": "0",
            "BENCH_HOSTS": str(self._hosts.count),
            "GLOO_SOCKET_IFNAME": self._hosts.interface,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        output = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  the stack closes it
        self._outputs.append(output)
        process = subprocess.Popen(
            self._hosts.inside(host, [sys.executable, "-m", "lightning_sparse.bench.rank"]),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            # Ctrl-C at a terminal is for us alone
            start_new_session=True,
        )
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(host, process.stdout), daemon=True).start()

    def _listen(self, rank: int, stream: IO[str]) -> None:
        for line in stream:
            self._messages.put((rank, json.loads(line)))
        self._messages.put((rank, None))

    def _gather(self, key: str, tick: Callable[[], None]) -> list[Any]:
        """What every rank says under ``key``, in rank order."""
        found: dict[int, Any] = {}
        while len(found) < len(self._processes):
            rank, message = self._messages.get()
            if message is None or "error" in message:
                raise RankError(self._describe(rank, message))
            if key in message:
                found[rank] = message[key]
            elif rank == 0:
                tick()
        return [found[rank] for rank in range(len(found))]

    def _describe(self, rank: int, message: dict[str, Any] | None) -> str:
        process, output = self._processes[rank], self._outputs[rank]
        what = message["error"] if message is not None else f"ended with code {process.wait()}"
        output.seek(0)
        return f"rank {rank} of {len(self._processes)} failed: {what}\n{output.read()[-_TAIL:]}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
