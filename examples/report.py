"""Reports finished runs: one table, a JSON file, and a picture of the validation losses."""

import json
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Curve = list[tuple[int, float]]


@rank_zero_only
def announce(text: str) -> None:
    """Prints what is about to run."""
    Console().rule(text)


@rank_zero_only
def write(rows: list[Row], curves: list[Curve], json_file: str | None, plot_file: str | None) -> None:
    """Prints the table and writes the files that were asked for; folders are made where missing."""
    Console().print(table(rows))
    if json_file is not None:
        _prepared(json_file).write_text(json.dumps(rows if len(rows) > 1 else rows[0], indent=2) + "\n")
    if plot_file is not None:
        plot(rows, curves, _prepared(plot_file))


def table(rows: list[Row]) -> Table:
    """One column per run, one line per figure."""
    first = rows[0]
    lines = Table(title=f"{first['parameters']:,} parameters, {first['steps']} steps, {first['world_size']} ranks")
    lines.add_column()
    for row in rows:
        lines.add_column(row["strategy"], justify="right")
    lines.add_row("exchange", *(row["exchange"] for row in rows))
    lines.add_row("density", *(f"{row['density']:.4g}" for row in rows))
    for key in first:
        if key.startswith("val_"):
            lines.add_row(key.replace("val_", "validation ").replace("_", " "), *(f"{row[key]:.4f}" for row in rows))
    lines.add_row("seconds per step", *(f"{row['seconds_per_step']:.4f}" for row in rows))
    lines.add_row("MB per step and rank", *(f"{row['bytes_per_step'] / 1e6:.4f}" for row in rows))
    lines.add_row("fewer bytes than dense", *(_factor(row) for row in rows))
    lines.add_row("ranks equal", *(str(row["ranks_equal"]) for row in rows))
    return lines


def plot(rows: list[Row], curves: list[Curve], path: Path) -> None:
    """Draws validation loss over steps and over bytes sent and received per rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    steps, sent = figure.subplots(1, 2, sharey=True)
    for row, curve in zip(rows, curves, strict=True):
        losses = [loss for _, loss in curve]
        label = f"{row['strategy']} ({row['exchange']})"
        steps.plot([step for step, _ in curve], losses, marker=".", label=label)
        sent.plot([step * row["bytes_per_step"] / 1e6 for step, _ in curve], losses, marker=".", label=label)
    steps.set(xlabel="step", ylabel="validation loss")
    sent.set(xlabel="MB sent and received per rank")
    if all(row["bytes_per_step"] > 0 for row in rows):
        sent.set_xscale("log")
    steps.legend()
    for axes in (steps, sent):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _factor(row: Row) -> str:
    return f"{row['dense_bytes_per_step'] / row['bytes_per_step']:.1f}x" if row["bytes_per_step"] else "-"


def _prepared(file: str) -> Path:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
