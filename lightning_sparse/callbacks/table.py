"""The summary of a run as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from lightning_sparse.callbacks.window import Traffic
from lightning_sparse.callbacks.words import against, percent, size

_EXTREMES = 3


def make_table(
    title: str,
    traffic: Traffic,
    asked: float,
    sent: float,
    ratio_label: str,
    ratio: float | None,
    layers: Mapping[str, float],
) -> Table:
    """Density, bytes, time and extremes of a run.

    Args:
        asked, sent: density, mean over looks.
        ratio_label, ratio: of the norms; None if there was no look.
        layers: density by parameter, of those that are not averaged densely.
    """
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("density", f"{percent(asked)} asked, {percent(sent)} sent with what is averaged densely")
    dense = traffic.dense_bytes_per_step
    saved = against(traffic.bytes_per_step, dense)
    table.add_row("bytes per step", f"{size(traffic.bytes_per_step)}, {saved} than {size(dense)} of dense float32")
    table.add_row("share of step time", ", ".join(f"{stage} {100 * x:.1f} %" for stage, x in traffic.shares.items()))
    if ratio is not None:
        table.add_row(ratio_label, f"{ratio:.3g}")
    ranked = sorted(layers.items(), key=lambda row: -row[1])
    densest, rest = ranked[:_EXTREMES], ranked[_EXTREMES:]
    if densest:
        table.add_row("densest layers" if rest else "layers", _lines(densest))
    if rest:
        table.add_row("sparsest layers", _lines(rest[-_EXTREMES:][::-1]))
    return table


def _lines(rows: Sequence[tuple[str, float]]) -> str:
    return "\n".join(f"{percent(value):>8}  {escape(name)}" for name, value in rows)
