"""Timing in alternation: what a slow moment of the machine costs, all that is compared pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch


def time_alternating(
    runs: dict[str, Callable[[], object]], repeats: int, device: torch.device, budget: float = math.inf
) -> dict[str, float]:
    """Median seconds of each run, timed in turns so that a slow moment of the machine meets all of them.

    A run that has taken `budget` seconds sits out the later turns; each is timed at least once.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if sum(seconds[name]) < budget:
                taken = seconds_of(run, device)
                # The first turn warms caches up, and compiles kernels.
                if turn:
                    seconds[name].append(taken)
    return {name: median(times) for name, times in seconds.items()}


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that one run takes on the device."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        first.record()
        run()
        last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000
