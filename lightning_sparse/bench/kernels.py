"""`bench kernels`: nanoseconds per element of the dense passes, beside a copy and an exact top-k."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_sparse.bench import kit
from lightning_sparse.kernels.accumulate_select import accumulate_select
from lightning_sparse.kernels.difference_select import difference_select
from lightning_sparse.kernels.scatter_add import scatter_add_
from lightning_sparse.kernels.select import select

SIZES = [100_000, 1_000_000, 10_000_000, 25_000_000]
DENSITIES = [0.001, 0.01, 0.1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK_SIZES = [10_000_000, 25_000_000]


def add_parser(names: Any) -> None:
    """Adds `kernels` to the benches."""
    parser = names.add_parser("kernels", help="the dense passes, per element")
    kit.add_options(parser)
    parser.add_argument("--sizes", type=float, nargs="+", help="elements of the vector, such as 1e6")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table, and writes what the options ask for."""
    pyplot = kit.pyplot() if options.plot else None
    device, threads = torch.device(options.device), torch.get_num_threads()
    sizes = [int(size) for size in options.sizes or (QUICK_SIZES if options.quick else SIZES)]
    densities, dtypes = ([0.01], ["fp32"]) if options.quick else (DENSITIES, list(DTYPES))
    cases = [(size, density, dtype) for size in sizes for density in densities for dtype in dtypes]

    def measure(case: tuple[int, float, str]) -> list[kit.Row]:
        size, density, dtype = case
        return _measure(_Case(size, density, dtype, device), options.repeats)

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


class _Case:
    """Inputs of one size, density and dtype, and what the ops must make of them."""

    def __init__(self, numel: int, density: float, dtype: str, device: torch.device) -> None:
        self.numel, self.density, self.dtype, self.device = numel, density, dtype, device
        generator = torch.Generator().manual_seed(0)
        self.k = max(1, round(numel * density))
        self.x = torch.randn(numel, generator=generator).to(DTYPES[dtype]).to(device)
        self.y = (torch.randn(numel, generator=generator) * 1e-3).to(device)
        # Adding zeros leaves the residual as it is, so that every repetition picks the same entries.
        self.zeros = torch.zeros_like(self.x)
        self.residual = self.x.float()
        self.target = torch.zeros(numel, device=device)
        self.copy = torch.empty(numel, device=device)
        self.threshold = self.x.float().abs().topk(self.k).values[-1]
        self.capacity = self.k + self.k // 8 + 64

    def runs(self) -> dict[str, Callable[[], Any]]:
        """What is timed, by name of the op."""
        pick = self.threshold, self.capacity
        values, indices, _ = select([self.x], *pick)

        def scatter_mean() -> None:
            for _ in range(2):
                scatter_add_([self.target], values, indices, 0.5)

        return {
            "memcpy": lambda: self.copy.copy_(self.residual),
            "accumulate_select": lambda: accumulate_select([self.zeros], [self.residual], *pick),
            "difference_select": lambda: difference_select([self.x], [self.y], *pick),
            "select": lambda: select([self.x], *pick),
            "scatter_mean": scatter_mean,
            "torch_topk": lambda: self.x.abs().topk(self.k, sorted=False),
        }

    def bytes_per_element(self) -> dict[str, float]:
        """The least an op must move, for each element of the vector."""
        x = self.x.element_size()
        # Each of 2 payloads: value and index read, target read and written.
        scatter = 2 * 16 * self.k / self.numel
        return {
            "memcpy": 8.0,
            "accumulate_select": x + 8.0,
            "difference_select": x + 4.0,
            "select": float(x),
            "scatter_mean": scatter,
            "torch_topk": float(x),
        }

    def check(self, runs: dict[str, Callable[[], Any]]) -> None:
        """Raises unless every op gives what plain torch gives."""
        x = self.x.float()
        for op, u in {"accumulate_select": x, "difference_select": x - self.y, "select": x}.items():
            values, indices, count = runs[op]()
            want = (u.abs() >= self.threshold).nonzero().view(-1)
            kept = want[: self.capacity]
            _require(op, int(count) == want.numel() and torch.equal(indices[: kept.numel()].long(), kept))
            _require(op, torch.equal(values[: kept.numel()], u[kept]) and not values[kept.numel() :].any())
        _require("accumulate_select", torch.equal(self.residual, x))
        runs["scatter_mean"]()
        kept = (x.abs() >= self.threshold).nonzero().view(-1)[: self.capacity]
        _require("scatter_mean", torch.equal(self.target, torch.zeros_like(x).index_copy(0, kept, x[kept])))
        runs["memcpy"]()
        _require("memcpy", torch.equal(self.copy, x))
        _require("torch_topk", runs["torch_topk"]().values.min().item() == self.threshold.item())


def _require(op: str, right: bool) -> None:
    if not right:
        raise RuntimeError(f"{op} gave a wrong result: its time would mean nothing")


def _measure(case: _Case, repeats: int) -> list[kit.Row]:
    runs, sizes = case.runs(), case.bytes_per_element()
    case.check(runs)
    seconds = kit.time_alternating(runs, repeats, case.device)
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
        style = "--" if op in ("memcpy", "torch_topk") else "-"
        axes.plot([row["numel"] for row in line], [row["ns_per_element"] for row in line], style, marker="o", label=op)
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="nanoseconds per element")
    axes.set_title(f"{shown[0]['dtype']} on {shown[0]['device']}, density {density:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
