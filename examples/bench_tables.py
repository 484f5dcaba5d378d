"""Prints what `bench kernels` and `bench layers` have measured as tables.

python -m lightning_sparse bench kernels --device cpu --quick --json FILE && python examples/bench_tables.py FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OPS = {
    "memcpy": "copy of the tensor",
    "accumulate_select": "`accumulate_select` (`Gradients`: add, compare, compact, write back)",
    "difference_select": "`difference_select` (`Updates`: subtract, compare, compact)",
    "momentum_select": "`momentum_select` (`MomentumResidual`)",
    "sampled_quantile": "the threshold of a 1 % sample",
    "radix_select": "the k-th largest, exactly",
    "top_k": "a step of `TopK`: add, threshold, the k largest",
    "sampled_top_k": "a step of `SampledTopK`",
    "decode_average": "clear, decode 2 payloads of bf16 and average them",
    "torch_topk": "`torch.topk`",
    "unfused": "add, `torch.topk`, gather and clear, one after the other",
}


def kernels(rows: list[Row]) -> str:
    """Markdown: nanoseconds an element of the largest vector, and how many copies of it that is."""
    numel = max(row["numel"] for row in rows)
    found = {row["op"]: row["ns_per_element"] for row in rows if row["numel"] == numel}
    lines = ["| | ns per element | of a copy |", "|---|---|---|"]
    for op, name in OPS.items():
        lines.append(f"| {name} | {found[op]:.2f} | {found[op] / found['memcpy']:.1f} |")
    return "\n".join(lines)


def layers(rows: list[Row]) -> str:
    """Markdown: how many times faster than the dense layer each case is."""
    lines = ["| layer | case | ms | dense | times faster |", "|---|---|---|---|---|"]
    for row in rows:
        times = f"{1000 * row['seconds']:.1f} | {1000 * row['dense_seconds']:.1f} | {row['speedup']:.2f}"
        lines.append(f"| `{row['layer']}` | {row['case']} | {times} |")
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """The table of either bench."""
    return layers(rows) if "layer" in rows[0] else kernels(rows)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"]))
