"""Prints the tables of what `train_lstm.py` and `train_slide.py` wrote.

python examples/layer_tables.py examples/results/layers/*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HEAD = ["", "ms per step", "loss after equal steps", "loss after equal time", "steps in that time"]


def table(rows: list[Row]) -> str:
    """A Markdown table, one line a variant; the first, which sets steps and time, without changes."""
    first = rows[0]
    lines = [HEAD, ["---"] * len(HEAD)]
    for row in rows:
        lines.append(
            [
                f"`{row['variant']}`",
                f"{1000 * row['seconds_per_step']:.0f}",
                f"{row['val_loss']:.4f}{_change(row['val_loss'], first)}",
                f"{row['equal_time_val_loss']:.4f}{_change(row['equal_time_val_loss'], first)}",
                str(row["equal_time_steps"]),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _change(loss: float, first: Row) -> str:
    return "" if loss == first["val_loss"] else f" ({loss / first['val_loss'] - 1:+.2%})"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        rows = json.loads(path.read_text())
        print(
            f"`{rows[0]['command']}`, {rows[0]['parameters']:,} parameters, {rows[0]['steps']} steps\n\n{table(rows)}"
        )
