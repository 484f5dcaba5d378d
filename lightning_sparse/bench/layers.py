"""`bench layers`: forward + backward of the sparse layers against the dense ones they replace, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_sparse.bench import kit, layer_cases
from lightning_sparse.bench.layer_cases import LayerCase
from lightning_sparse.bench.lsh_cases import lsh_linear
from lightning_sparse.bench.lstm_cases import sparse_lstm
from lightning_sparse.bench.skip_cases import skip_layers

CASES = [*layer_cases.CASES, sparse_lstm, lsh_linear, skip_layers]
# seconds of timed runs of one layer in one case
BUDGET = 5.0


def add_parser(names: Any) -> None:
    """Adds `layers` to the benches."""
    parser = names.add_parser("layers", help="sparse layers against dense ones, and where they cross")
    kit.add_options(parser)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose layer and case contain the text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table, and writes what the options ask for."""
    pyplot = kit.pyplot() if options.plot else None
    device, threads = torch.device(options.device), torch.get_num_threads()
    every = [case for cases in CASES for case in cases(device, options.quick)]
    chosen = [case for case in every if options.only.lower() in f"{case.layer}, {case.case}".lower()]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.layer for case in every))
        raise SystemExit(f"--only: expected part of a case of {names}, got {options.only!r}")
    torch.set_num_threads(options.threads)
    try:
        rows = kit.with_progress("layers", chosen, lambda case: [_measure(case, device, options.repeats)])
        if options.json:
            kit.write_json(options.json, rows, device)
    finally:
        torch.set_num_threads(threads)
    formats: dict[str, Callable[[Any], str]] = {
        "layer": str,
        "case": str,
        "seconds": "{:.2e}".format,
        "dense_seconds": "{:.2e}".format,
        "speedup": "{:.2f}".format,
        "crossover": lambda density: "-" if density is None else f"{density:.2f}",
    }
    kit.print_table(f"layers on {device}, {options.threads} thread(s) on the CPU", rows, formats, wrapped=["case"])
    if pyplot:
        _plot(pyplot, rows, options.plot)


def _measure(case: LayerCase, device: torch.device, repeats: int) -> kit.Row:
    contest = case.make()
    contest.sparse()
    if not contest.check():
        raise RuntimeError(f"{case.layer}, {case.case}: a wrong result, its time would mean nothing")
    seconds = kit.time_alternating({"sparse": contest.sparse, "dense": contest.dense}, repeats, device, BUDGET)
    return {
        "layer": case.layer,
        "case": case.case,
        "device": str(device),
        "seconds": seconds["sparse"],
        "dense_seconds": seconds["dense"],
        "speedup": seconds["dense"] / seconds["sparse"],
        "crossover": contest.crossover() if contest.crossover else None,
    }


def _plot(pyplot: Any, rows: Sequence[kit.Row], path: Path) -> None:
    """Draws how many times faster than dense each case is, a colour for each layer."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.3 * len(rows)), layout="constrained")
    for at, row in enumerate(reversed(rows)):
        axes.barh(f"{row['layer']}: {row['case']}", row["speedup"], color=f"C{layers.index(row['layer'])}")
        axes.annotate(f" {row['speedup']:.2g}", (row["speedup"], at), va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1)
    axes.set(xlabel="times faster than the dense layer, forward + backward", title=f"layers on {rows[0]['device']}")
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
