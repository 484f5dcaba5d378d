"""`bench kernels`: nanoseconds per element of the dense passes, beside a copy and what others do."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_sparse.bench import kit
from lightning_sparse.bench.kernel_case import DTYPES, KernelCase

log = logging.getLogger(__name__)

SIZES = [10_000, 100_000, 1_000_000, 10_000_000, 25_000_000, 100_000_000]
DENSITIES = [0.0001, 0.001, 0.01, 0.1]
QUICK_SIZES = [10_000_000, 25_000_000]
# The inputs, and the float64 magnitudes of the check or the values and positions of a sort.
BYTES_PER_ELEMENT = 72
# Seconds of timed runs of one op in one case, after which it sits out: `torch.sort` takes seconds.
BUDGET = 2.0
BASELINES = ("memcpy", "torch_topk", "torch_sort", "unfused")


def add_parser(names: Any) -> None:
    """Adds `kernels` to the benches."""
    parser = names.add_parser("kernels", help="the dense passes, per element")
    kit.add_options(parser)
    parser.add_argument("--sizes", type=kit.count, nargs="+", help="elements of the vector, such as 1e6")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table, and writes what the options ask for."""
    pyplot = kit.pyplot() if options.plot else None
    device, threads = torch.device(options.device), torch.get_num_threads()
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    room = kit.free_bytes(device) // BYTES_PER_ELEMENT
    if max(sizes) > room:
        log.warning("left out what does not fit in memory: sizes above %d", room)
        sizes = [size for size in sizes if size <= room] or [room]
    densities, dtypes = ([0.01], ["fp32"]) if options.quick else (DENSITIES, list(DTYPES))
    cases = [(size, density, dtype) for size in sizes for density in densities for dtype in dtypes]

    def measure(case: tuple[int, float, str]) -> list[kit.Row]:
        size, density, dtype = case
        return _measure(KernelCase(size, density, dtype, device), options.repeats)

    torch.set_num_threads(options.threads)
    try:
        rows = kit.with_progress("kernels", cases, measure)
        if options.json:
            kit.write_json(options.json, rows, device)
    finally:
        torch.set_num_threads(threads)
    formats: dict[str, Callable[[Any], str]] = {
        "op": str,
        "dtype": str,
        "numel": "{:.3g}".format,
        "density": "{:g}".format,
        "seconds": "{:.1e}".format,
        "ns_per_element": "{:.3f}".format,
        "bytes_per_element": "{:.2f}".format,
        "percent_of_copy": "{:.0f}".format,
    }
    kit.print_table(f"kernels on {device}, {options.threads} thread(s) on the CPU", rows, formats)
    if pyplot:
        _plot(pyplot, rows, options.plot)


def _measure(case: KernelCase, repeats: int) -> list[kit.Row]:
    runs, sizes = case.runs(), case.bytes_per_element()
    case.check(runs)
    seconds = kit.time_alternating(runs, repeats, case.device, BUDGET)
    copy_rate = sizes["memcpy"] / seconds["memcpy"]
    return [
        {
            "op": op,
            "device": str(case.device),
            "dtype": case.dtype,
            "numel": case.numel,
            "density": case.density,
            "seconds": seconds[op],
            "ns_per_element": seconds[op] * 1e9 / case.numel,
            "bytes_per_element": sizes[op],
            "percent_of_copy": 100 * sizes[op] / seconds[op] / copy_rate,
        }
        for op in runs
    ]


def _plot(pyplot: Any, rows: Sequence[kit.Row], path: Path) -> None:
    """Draws nanoseconds per element over the size, one line an op, at the density nearest to 1 % in the first dtype."""
    density = min((row["density"] for row in rows), key=lambda value: abs(value - 0.01))
    shown = [row for row in rows if row["density"] == density and row["dtype"] == rows[0]["dtype"]]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for op in dict.fromkeys(row["op"] for row in shown):
        line = [row for row in shown if row["op"] == op]
        style = "--" if op in BASELINES else "-"
        axes.plot([row["numel"] for row in line], [row["ns_per_element"] for row in line], style, marker="o", label=op)
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="nanoseconds per element")
    axes.set_title(f"{shown[0]['dtype']} on {shown[0]['device']}, density {density:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
