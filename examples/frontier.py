"""Runs the board of losses over bytes on virtual ranks, keeps each finished run, and prints it as Markdown.

python examples/frontier.py               # runs what is missing, then prints (about an hour on two cores)
python examples/frontier.py --print       # prints what is there
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "convergence"

# what one call of the bench runs: recipes at a density, on so many ranks, at these learning rates
BOARD = (
    "--recipes dense --ranks 2 --lr 2e-3 4e-3",
    "--recipes dense --ranks 4 8 --lr 4e-3",
    "--recipes blocks-1bit --density 0.25 --ranks 2 --lr 2e-3 4e-3",
    "--recipes blocks-1bit --density 0.25 --ranks 4 8 --lr 4e-3",
    "--recipes blocks-1bit-serial --density 0.25 --ranks 4 --lr 4e-3",
    "--recipes blocks-4bit gradients-4bit --density 1 --ranks 4 --lr 4e-3",
)
COMMON = "--example examples/train_lm.py --points 5 --steps 1000 --set batch_size=4"
NAMES = {
    "dense": "dense",
    "blocks-1bit": "`sparse_ddp`, default",
    "blocks-1bit-serial": "`exchange=Updates(overlap=False)`",
    "blocks-4bit": "`density=1, codec=Quantized(4)`",
    "gradients-4bit": "`exchange=Gradients(), density=1, codec=Quantized(4)`",
}


def run() -> None:
    """Run what the folder of results lacks."""
    for line in BOARD:
        words = f"{COMMON} {line} --cache {RESULTS.relative_to(HERE.parent)}".split()
        subprocess.run(
            [sys.executable, "-m", "lightning_sparse", "bench", "convergence", *words],
            check=True,
            cwd=HERE.parent,
            stdout=subprocess.DEVNULL,
        )


def markdown() -> str:
    """The best learning rate tried of each recipe, against the best dense one on as many ranks."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        key = found["world_size"], found["recipe"]
        if key not in best or loss(found) < loss(best[key]):
            best[key] = found
    lines = [
        "| ranks | recipe | learning rate | validation loss | against dense | of dense bytes |",
        "|---|---|---|---|---|---|",
    ]
    for (ranks, recipe), found in sorted(best.items(), key=lambda item: (item[0][0], list(NAMES).index(item[0][1]))):
        if (ranks, "dense") not in best:
            continue
        dense = best[ranks, "dense"]
        sent = found["curve"]["bytes"][-1] / dense["curve"]["bytes"][-1]
        gap = loss(found) / loss(dense) - 1
        cells = [str(ranks), NAMES[recipe], f"{found['lr']:g}", f"{loss(found):.4f}", f"{gap:+.2%}", f"{sent:.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def loss(result: dict[str, Any]) -> float:
    """At the end of training."""
    return result["curve"]["losses"][-1]


def main() -> None:
    """Run, then print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="print what is there, run nothing")
    if not parser.parse_args().print:
        run()
    print(markdown())


if __name__ == "__main__":
    main()
