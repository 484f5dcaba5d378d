"""`bench network`: step time and bytes of strategies on hosts that links of a chosen rate join."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from lightning_sparse.bench import kit
from lightning_sparse.bench.hosts import Hosts, Loopback, RefusedError
from lightning_sparse.bench.launch import RankError, Ranks
from lightning_sparse.bench.network_options import add_options, complete, validation_interval
from lightning_sparse.bench.network_plots import draw
from lightning_sparse.bench.network_rows import make_rows


def add_parser(names: Any) -> None:
    """Adds `network` to the benches."""
    parser = names.add_parser("network", help="step time over links of a chosen rate")
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Trains with every strategy at every rate, prints the table, and writes what the options ask for."""
    complete(options)
    pyplot = kit.pyplot() if options.plot else None
    rows: list[kit.Row] = []
    try:
        with _hosts(options) as hosts, Ranks(hosts, options.threads) as ranks, _progress() as progress:
            rates = [None] if hosts.is_loopback else options.rate
            bar = progress.add_task("", total=len(rates) * options.repeat * len(options.strategies) * options.steps)
            for rate in rates:
                hosts.limit(rate)
                rows += _measure(ranks, hosts, rate, options, progress, bar)
                # a long run may be interrupted: what is measured by then is kept
                if options.json:
                    kit.write_json(options.json, rows, torch.device("cpu"))
    except RankError as failure:
        raise SystemExit(f"bench network: {failure}") from failure
    except KeyboardInterrupt:
        raise SystemExit("bench network: interrupted; --json holds the rates that were done") from None
    _print(rows, options)
    if pyplot:
        draw(pyplot, rows, options.plot)


def _measure(
    ranks: Ranks, hosts: Hosts | Loopback, rate: float | None, options: argparse.Namespace, progress: Progress, bar: Any
) -> list[kit.Row]:
    """The rows of one rate: every strategy once, and again, as often as asked for."""
    task = {
        "model": options.model,
        "steps": options.steps,
        "validate_every": validation_interval(options.steps),
        "interface": None if hosts.is_loopback else hosts.interface,
        "options": {
            "width": options.width,
            "example": str(options.example.resolve()),
            "arguments": options.arguments,
        },
    }
    runs: dict[str, list[Any]] = {name: [] for name in options.strategies}
    for _, name in itertools.product(range(options.repeat), options.strategies):
        progress.update(bar, description=f"{name} at {_name(rate)}")
        runs[name].append(ranks.run(task | {"strategy": name}, lambda: progress.advance(bar)))
    common = {
        "hosts": options.hosts,
        "rate_mbit": rate,
        "loopback": hosts.is_loopback,
        "model": options.model,
        "steps": options.steps,
        "repeats": options.repeat,
        "threads": options.threads,
    }
    return make_rows(runs, common, options.slack)


@contextmanager
def _hosts(options: argparse.Namespace) -> Iterator[Hosts | Loopback]:
    hosts: Hosts | Loopback
    try:
        hosts = Hosts(options.hosts)
    except RefusedError as refusal:
        Console(stderr=True).print(
            f"bench network: no network namespaces on this machine ({refusal}): ranks share its loopback instead,"
            " --rate is left out, and rows say loopback",
            markup=False,
        )
        hosts = Loopback(options.hosts)
    with hosts:
        yield hosts


def _progress() -> Progress:
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _print(rows: list[kit.Row], options: argparse.Namespace) -> None:
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "strategy": ("strategy", str),
        "Mbit/s": ("rate_mbit", _name),
        "step s": ("step_seconds", "{:.4f}".format),
        "x ddp": ("ratio_to_ddp", _optional("{:.2f}")),
        "x alone": ("ratio_to_bound", _optional("{:.2f}")),
        "MB": ("bytes_per_step", _megabytes),
        "own MB": ("counted_bytes_per_step", _megabytes),
    }
    if options.model == "lm":
        columns["loss"] = "val_loss", _optional("{:.3f}")
        columns["s to target"] = "seconds_to_target", _optional("{:.1f}")
    shown = [{title: row[key] for title, (key, _) in columns.items()} for row in rows]
    where = "this machine's loopback" if rows[0]["loopback"] else f"{options.hosts} hosts"
    title = f"{options.model}, {rows[0]['parameters']:,} parameters, on {where}"
    kit.print_table(title, shown, {name: text for name, (_, text) in columns.items()})


def _optional(text: str) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else text.format(value)


def _megabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.3f}"


def _name(rate: float | None) -> str:
    return "unlimited" if rate is None else f"{rate:g}"
