"""Reports what `train_large_batch.py` has trained: a table, as text and as markdown, and a picture."""

import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

Row = dict[str, Any]
WITHIN = 0.03  # of the loss at the base batch: what counts as reached


def losses_of(rows: list[Row]) -> dict[tuple[str, str, int], list[float]]:
    """The losses of all seeds, by example, rule and factor."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["example"], row["rule"], row["factor"]), []).append(row["val_loss"])
    return found


def cells(rows: list[Row]) -> list[list[str]]:
    """A line for each example and rule: the mean loss at each factor, and how far it is from the base batch's."""
    losses = losses_of(rows)
    factors = sorted({factor for _, _, factor in losses})
    lines = []
    for name, rule in dict.fromkeys((name, rule) for name, rule, factor in losses if factor > 1):
        base = statistics.fmean(losses[name, "none", 1])
        line = [name, rule, f"{base:.4f}"]
        for factor in factors[1:]:
            if (name, rule, factor) in losses:
                loss = statistics.fmean(losses[name, rule, factor])
                line.append(f"{loss:.4f} ({loss / base - 1:+.1%})" + (" *" if loss <= (1 + WITHIN) * base else ""))
            else:
                line.append("")
        lines.append(line)
    return lines


def header(rows: list[Row]) -> list[str]:
    """Of the columns of `cells`."""
    return ["example", "rule", *(f"batch x{factor}" for factor in sorted({row["factor"] for row in rows}))]


def markdown(rows: list[Row]) -> str:
    """The table as the README holds it."""
    lines = [header(rows), ["---"] * len(header(rows)), *cells(rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(rows: list[Row]) -> Table:
    """The same for a terminal."""
    seeds = len({row["seed"] for row in rows})
    title = f"validation loss, mean of {seeds} seeds, {rows[0]['ranks']} ranks; * within {WITHIN:.0%} of batch x1"
    out = Table(*header(rows), title=title)
    for line in cells(rows):
        out.add_row(*line)
    return out


def plot(rows: list[Row], path: Path) -> None:
    """Draws loss over batch, one panel an example, with the range over seeds."""
    from matplotlib.figure import Figure

    losses = losses_of(rows)
    names = list(dict.fromkeys(row["example"] for row in rows))
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for rule in dict.fromkeys(rule for example, rule, _ in losses if example == name):
            points = {f: x for (example, r, f), x in losses.items() if example == name and r == rule}
            points.setdefault(1, losses[name, "none", 1])
            order = sorted(points)
            means = [statistics.fmean(points[f]) for f in order]
            spread = [[m - min(points[f]) for f, m in zip(order, means, strict=True)]]
            spread.append([max(points[f]) - m for f, m in zip(order, means, strict=True)])
            axes.errorbar(order, means, spread, marker=".", capsize=3, label=rule)
        axes.set(xscale="log", xlabel="batch over base batch", ylabel="validation loss", title=name)
        axes.set_xticks(sorted({row["factor"] for row in rows}), [f"x{f}" for f in sorted({r["factor"] for r in rows})])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
