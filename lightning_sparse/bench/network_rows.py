"""Rows of `bench network`: from the laps of all ranks to medians, ratios, and the time to a loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from lightning_sparse.bench import kit
from lightning_sparse.bench.contenders import BOUND, DENSE, warmup_of
from lightning_sparse.bench.hosts import burst_bytes

# results of one training, in rank order
Training = list[dict[str, Any]]


def make_rows(runs: dict[str, list[Training]], common: kit.Row, slack: float) -> list[kit.Row]:
    """One row a strategy; ``runs`` holds its trainings.

    ``step_seconds`` is the median over trainings of the mean step of the slowest rank, warm-up steps left out: the
    mean, because some strategies exchange in every fourth step only. ``bytes_per_step`` were seen on the interface,
    sent + received, mean over ranks; ``counted_bytes_per_step`` by our own counter. Ratios are of speeds, against
    ``ddp`` and against ranks that exchange nothing: more is better, 1 is as fast. What was not measured is None.

    Raises:
        RuntimeError: more came over a link than its rate allows.
    """
    rows = []
    for name, trainings in runs.items():
        _check_rate(name, trainings, common["rate_mbit"])
        warmup = warmup_of(name)
        seconds = [_step_seconds(training, warmup) for training in trainings]
        row = {"strategy": name, **common, "parameters": trainings[0][0]["parameters"]}
        row |= {"step_seconds": median(seconds), "min_step_seconds": min(seconds), "max_step_seconds": max(seconds)}
        for key in ("bytes", "counted_bytes"):
            row[f"{key}_per_step"] = _mean_lap(trainings, key, warmup)
        for stage in ("select", "encode", "exchange", "decode"):
            row[f"{stage}_seconds"] = _mean_lap(trainings, f"{stage}_seconds", warmup)
        rows.append(row)
    known = {row["strategy"]: row["step_seconds"] for row in rows}
    for row in rows:
        for key, name in (("ratio_to_ddp", DENSE), ("ratio_to_bound", BOUND)):
            row[key] = known[name] / row["step_seconds"] if name in known else None
    _add_losses(rows, runs, slack)
    return rows


def _add_losses(rows: list[kit.Row], runs: dict[str, list[Training]], slack: float) -> None:
    """The validation losses, and when the target was reached; ranks alone train nothing that could be compared."""
    target = None
    if runs.get(DENSE) and runs[DENSE][0][0]["curve"]:
        target = median(training[0]["curve"][-1][1] for training in runs[DENSE]) * (1 + slack)
    for row in rows:
        trainings = runs[row["strategy"]]
        row |= {"val_loss": None, "target_loss": target, "seconds_to_target": None}
        curves = [training[0]["curve"] for training in trainings]
        if row["strategy"] == BOUND or not curves[0]:
            continue
        row["val_loss"] = median(curve[-1][1] for curve in curves)
        row["losses"] = [loss for _, loss in curves[0]]
        row["loss_seconds"] = [_clock(trainings[0])[step - 1] for step, _ in curves[0]]
        reached = [_reached(training, target) for training in trainings]
        times = [time for time in reached if time is not None]
        if len(times) == len(trainings):
            row["seconds_to_target"] = median(times)


def _reached(training: Training, target: float | None) -> float | None:
    """Seconds of training until the first validation at or below ``target``."""
    if target is None:
        return None
    clock = _clock(training)
    return next((clock[step - 1] for step, loss in training[0]["curve"] if loss <= target), None)


def _clock(training: Training) -> list[float]:
    """Seconds of training behind each step: what the slowest rank took for each, warm-up included, added up."""
    steps = zip(*(result["laps"] for result in training), strict=True)
    return list(itertools.accumulate(max(lap["seconds"] for lap in laps) for laps in steps))


def _step_seconds(training: Training, warmup: int) -> float:
    return max(fmean(lap["seconds"] for lap in result["laps"][warmup:]) for result in training)


def _mean_lap(trainings: Sequence[Training], key: str, warmup: int) -> float | None:
    """Median over trainings of the mean over ranks and timed steps; None if no lap has it."""
    means = []
    for training in trainings:
        laps = [lap for result in training for lap in result["laps"][warmup:]]
        if not any(key in lap for lap in laps):
            return None
        means.append(fmean(lap.get(key, 0.0) for lap in laps))
    return median(means)


def _check_rate(name: str, trainings: Sequence[Training], rate: float | None) -> None:
    """Both directions together carry at most twice the rate, and what a burst lets through at once."""
    if rate is None:
        return
    for result in itertools.chain.from_iterable(trainings):
        seconds, moved = (sum(lap[key] for lap in result["laps"]) for key in ("seconds", "bytes"))
        most = 2 * (seconds * rate * 1e6 / 8 + 2 * burst_bytes(rate))
        if moved > 1.02 * most:
            raise RuntimeError(
                f"{name}: expected at most {most:.0f} bytes in {seconds:.3f} s at {rate:g} Mbit/s, got {moved:.0f}: the"
                " limit does not hold, and times mean nothing"
            )
