"""What every bench shares: its options, timing in alternation, the table, JSON and plots."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lightning_sparse.timing import time_alternating
from lightning_sparse.version import __version__

__all__ = [
    "Row",
    "add_options",
    "add_outputs",
    "count",
    "fraction",
    "free_bytes",
    "positive",
    "print_table",
    "pyplot",
    "time_alternating",
    "with_progress",
    "write_json",
]

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every bench takes."""
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=count, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--repeats", type=count, default=7, help="timed runs of each case (default: 7)")
    add_outputs(parser, "draw the rows as a PNG")


def add_outputs(parser: argparse.ArgumentParser, plot: str) -> None:
    """Adds `--json` and `--plot`, which says what it draws."""
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the rows and the machine")
    parser.add_argument("--plot", type=_file, metavar="FILE", help=f"{plot}; needs matplotlib")


def count(text: str) -> int:
    """A whole number from 1 on, such as 1e6; of a command line."""
    number = positive(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(number)


def positive(text: str) -> float:
    """A finite number above 0; of a command line."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def fraction(text: str) -> float:
    """A number in (0, 1]; of a command line."""
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], got {text!r}")
    return number


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here: use --device cpu")
    return text


def _file(text: str) -> Path:
    path = Path(text)
    try:
        # not found to be impossible after an hour
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written, got {text!r}: {error.strerror}"
        ) from None
    return path


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing to files.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors may take on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def with_progress(title: str, cases: Sequence[Any], measure: Callable[[Any], Iterable[Row]]) -> list[Row]:
    """The rows of all cases, behind a progress bar on standard error."""
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case in progress.track(cases, description=title):
            rows.extend(measure(case))
    return rows


def print_table(
    title: str, rows: Sequence[Row], formats: dict[str, Callable[[Any], str]], wrapped: Sequence[str] = ()
) -> None:
    """Prints rows as one table; `formats` gives its columns, in order, and the text of a value.

    Where they are too wide for the terminal, `wrapped` columns take more lines, or the numbers are cut.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in formats:
        text = isinstance(rows[0][name], str)
        table.add_column(name.replace("_", " "), justify="left" if text else "right", no_wrap=bool(wrapped) or text)
        table.columns[-1].no_wrap &= name not in wrapped
    for row in rows:
        table.add_row(*(format_(row[name]) for name, format_ in formats.items()))
    Console().print(table)


def write_json(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """Writes {"machine": ..., "versions": ..., "rows": ...}."""
    machine = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
    versions = {"lightning_sparse": __version__, "torch": torch.__version__, "python": platform.python_version()}
    path.write_text(json.dumps({"machine": machine, "versions": versions, "rows": list(rows)}, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
