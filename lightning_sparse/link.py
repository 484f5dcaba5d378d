"""What the link between ranks gives now, measured by small all-reduces."""

from __future__ import annotations

import time
from statistics import median

import torch

from lightning_sparse.reducer import Reducer

# a message of the smaller size is all that a slow link is asked for
_SIZES = (1 << 16, 1 << 21)
_ENOUGH = 0.05
_REPEATS = 3


def all_reduce_seconds(reducer: Reducer, numel: int) -> float:
    """Seconds that a dense all-reduce of ``numel`` float32 elements takes; the same number on every rank.

    Measured on smaller ones, so a small part of latency too much is in it. Every rank calls it.
    """
    seconds = 0.0
    for size in _SIZES:
        size = min(size, numel)
        mine = reducer.call(lambda size=size: _time(reducer, size))  # type: ignore[misc]
        seconds = reducer.agree([mine])[0] * numel / size
        if seconds * size / numel > _ENOUGH or size == numel:
            break
    return seconds


def _time(reducer: Reducer, size: int) -> float:
    device = reducer.device
    buffer = torch.zeros(size, device=device)
    times = []
    # the first one finds the ranks at different places
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        reducer.transport.all_reduce_mean_(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])
