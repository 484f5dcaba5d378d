"""Prints what `bench network` has measured as a table.

python -m lightning_sparse bench network --json FILE && python examples/network_table.py FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "ddp": "`ddp`",
    "ddp-fp16": "`ddp`, fp16 hook",
    "ddp-powersgd": "`ddp`, PowerSGD hook, rank 4",
    "updates": "`sparse_ddp`, default",
    "guarded": "`sparse_ddp`, default, once the guard has decided",
    "updates-auto": '`exchange=Updates(overlap=True), density="auto"`, once it has measured',
    "updates-overlap": "`exchange=Updates(overlap=True)`",
    "updates-every4": "`exchange=Updates(every=4)`",
    "updates-4bit": "`density=0.01, codec=Quantized(4)`",
    "updates-topk": "`density=0.01` (`TopK`)",
    "gradients": "`exchange=Gradients(), density=0.01`",
    "alone": "no exchange at all",
}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of a step and how many times faster than ddp it is, for each rate."""
    rates = sorted({row["rate_mbit"] or float("inf") for row in rows})
    heads = [f"{rate:.0f} Mbit/s" if rate < float("inf") else "unlimited" for rate in rates]
    lines = [
        "| " + " | ".join(["ms per step (times faster than `ddp`)", *heads]) + " |",
        "|" + "---|" * (len(rates) + 1),
    ]
    for strategy, name in NAMES.items():
        found = {row["rate_mbit"] or float("inf"): row for row in rows if row["strategy"] == strategy}
        if not found:
            continue
        cells = [_cell(found[rate]) if rate in found else "-" for rate in rates]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def losses(rows: list[dict[str, Any]]) -> str:
    """Markdown, for the language model: step time, bytes, last loss, and when the loss was within 1 % of ddp's last."""
    (target,) = {1.01 * row["val_loss"] for row in rows if row["strategy"] == "ddp"}
    lines = ["| | ms per step | MB per step | loss | s to `ddp`'s loss + 1 % |", "|---|---|---|---|---|"]
    for row in rows:
        times = zip(row["loss_seconds"], row["losses"], strict=True)
        reached = next((f"{at:.0f}" for at, loss in times if loss <= target), "-")
        cells = f"{1000 * row['step_seconds']:.0f} | {row['bytes_per_step'] / 1e6:.2f} | {row['val_loss']:.3f}"
        lines.append(f"| {NAMES[row['strategy']]} | {cells} | {reached} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    times = "" if row["ratio_to_ddp"] is None else f" ({row['ratio_to_ddp']:.1f})"
    return f"{1000 * row['step_seconds']:.0f}{times}"


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text())["rows"]
    print(losses(measured) if measured[0]["model"] == "lm" else table(measured))
