"""Worker: one daemon thread that runs tasks in the order they were handed over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

_T = TypeVar("_T")


class Worker:
    """Runs tasks one after the other, on a stream of its own where there is a GPU.

    After a task has failed, all later ones fail with the same error: the order of collectives is lost.

    Args:
        device: where the tensors of the tasks live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # a daemon: a collective that waits for a dead rank must not keep the interpreter alive
        self._thread = threading.Thread(target=self._loop, name="lightning_sparse", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], _T]) -> Future[_T]:
        """Queue a task; what the calling stream has been given so far is done before it starts."""
        future: Future[_T] = Future()
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()

        def run() -> None:
            if self._error is not None:
                future.set_exception(self._error)
                return
            try:
                if ready is not None and self._stream is not None:
                    self._stream.wait_event(ready)
                result = task()
                if self._stream is not None:
                    # whoever waits may use the result on any stream
                    self._stream.synchronize()
                future.set_result(result)
            except BaseException as error:
                self._error = error
                future.set_exception(error)

        self._tasks.put(run)
        return future

    def close(self, timeout: float = 5.0) -> bool:
        """Let queued tasks end, for at most ``timeout`` seconds, and stop the thread; whether it has stopped."""
        self._tasks.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        while (task := self._tasks.get()) is not None:
            task()
