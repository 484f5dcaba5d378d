"""Pictures of `bench network`: step time over the rate of the links, and loss over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sparse.bench import kit
from lightning_sparse.bench.contenders import BOUND, CONTENDERS


def draw(pyplot: Any, rows: Sequence[kit.Row], path: Path) -> None:
    """Write a PNG: step time over rate, and beside it, where there are losses, one panel of them for each rate."""
    rates = sorted({row["rate_mbit"] for row in rows}, key=lambda rate: (rate is None, rate))
    panels = [rate for rate in rates if any(_has_curve(row, rate) for row in rows)]
    size = (7 + 4.5 * len(panels), 5)
    widths = [1.5] + [1.0] * len(panels)
    figure, grid = pyplot.subplots(
        1, 1 + len(panels), figsize=size, width_ratios=widths, squeeze=False, layout="constrained"
    )
    colors = {name: f"C{index}" for index, name in enumerate(CONTENDERS)}
    first, *others = grid[0]
    _draw_times(first, rows, rates, colors)
    for axes, rate in zip(others, panels, strict=True):
        for row in rows:
            if _has_curve(row, rate):
                axes.plot(row["loss_seconds"], row["losses"], marker=".", color=colors[row["strategy"]])
        axes.set(title=_label(rate, rows[0]["loopback"]), xlabel="seconds of training", ylabel="validation loss")
        axes.set_xscale("log")
        _label_decades(axes.xaxis)
        axes.grid(alpha=0.3, which="both")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_times(axes: Any, rows: Sequence[kit.Row], rates: list[float | None], colors: dict[str, str]) -> None:
    known = [rate for rate in rates if rate is not None]
    # no limit stands one step beside the fastest link
    places = {rate: rate for rate in known} | ({None: 3 * max(known)} if known else {None: 1.0})
    for name in dict.fromkeys(row["strategy"] for row in rows):
        line = sorted((places[row["rate_mbit"]], row["step_seconds"]) for row in rows if row["strategy"] == name)
        bound = name == BOUND
        style = {"color": "black", "linestyle": "--"} if bound else {"color": colors[name], "marker": "o"}
        label = f"{name} (no exchange)" if bound else name
        if bound and len(line) == 1:
            axes.axhline(line[0][1], label=label, **style)
        else:
            axes.plot(*zip(*line, strict=True), label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="rate of a link", ylabel="seconds per step, slowest rank")
    axes.set_xticks([places[rate] for rate in rates], [_label(rate, rows[0]["loopback"]) for rate in rates])
    axes.set_xticks([], minor=True)
    _label_decades(axes.yaxis)
    axes.set_title(f"{rows[0]['model']}, {rows[0]['parameters'] / 1e6:.3g} M parameters, {rows[0]['hosts']} ranks")
    axes.grid(alpha=0.3, which="both")


def _label_decades(axis: Any) -> None:
    """1, 2 and 5 of every decade in plain digits, so that an axis of less than one decade has labels too."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())


def _has_curve(row: kit.Row, rate: float | None) -> bool:
    return row["rate_mbit"] == rate and "losses" in row


def _label(rate: float | None, is_loopback: bool) -> str:
    if rate is None:
        return "loopback" if is_loopback else "unlimited"
    return f"{rate:g} Mbit/s"
