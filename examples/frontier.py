"""Runs the boards of losses over bytes on virtual ranks, keeps each finished run, and prints them as Markdown.

python examples/frontier.py               # runs what is missing, then prints (some hours on two cores)
python examples/frontier.py --print       # prints what is there
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "convergence"


class Board(NamedTuple):
    """Runs that are compared with each other.

    ``lines`` are what one call of the bench each runs: recipes at a density, on so many ranks, at these learning rates.
    """

    title: str
    example: str
    common: str
    lines: tuple[str, ...]


BOARDS = (
    Board(
        "Language model, 0.9 M parameters, AdamW, 1000 steps",
        "train_lm.py",
        "--steps 1000 --set batch_size=4",
        (
            "--recipes dense --ranks 2 --lr 2e-3 4e-3",
            "--recipes dense --ranks 4 8 16 --lr 4e-3",
            "--recipes blocks-1bit --density 0.25 --ranks 2 4 8 16 --lr 4e-3",
            "--recipes blocks-4bit --density 0.01 0.04 --ranks 2 --lr 4e-3",
            "--recipes dense blocks-1bit --density 0.25 --ranks 4 --lr 4e-3 --seeds 1",
            "--recipes blocks-2bit --density 0.5 --ranks 4 --lr 4e-3",
            "--recipes blocks-4bit --density 1 --ranks 4 --lr 4e-3",
        ),
    ),
    Board(
        "Language model, 5 M parameters, AdamW, 1000 steps",
        "train_lm.py",
        "--steps 1000 --set batch_size=4 model_size=medium",
        ("--recipes dense blocks-1bit --density 0.25 --ranks 2 --lr 2e-3",),
    ),
    Board(
        "Digits, SGD with momentum, 1000 steps",
        "train_digits.py",
        "--steps 1000",
        (
            "--recipes dense blocks-1bit --density 0.25 --ranks 2 --lr 0.05 0.1 --seeds 0 1 2",
            "--recipes blocks-2bit --density 0.5 --ranks 2 --lr 0.05 0.1 --seeds 0 1 2",
            "--recipes blocks-4bit --density 1 --ranks 2 --lr 0.05 0.1 --seeds 0 1 2",
            "--recipes dense blocks-1bit --density 0.25 --ranks 4 --lr 0.05 0.1",
            "--recipes dense blocks-1bit --density 0.25 --ranks 8 16 --lr 0.1",
        ),
    ),
    *(
        Board(
            f"Language model, 0.9 M parameters, {name}, 300 steps",
            "optimizers.py",
            f"--steps 300 --set optimizer={key}",
            (f"--recipes dense blocks-1bit --density 0.25 --ranks 4 --lr {rates}",),
        )
        for name, key, rates in (
            ("Adam", "adam", "4e-3"),
            ("SGD with momentum", "sgd", "0.3"),
            ("Lion", "lion", "4e-4"),
            ("Muon (matrices of the blocks) and AdamW (the rest)", "muon", "4e-3"),
        )
    ),
)
NAMES = {
    "dense 1": "dense",
    "blocks-1bit 0.25": "`sparse_ddp`, default",
    "blocks-2bit 0.5": "`density=0.5, codec=Quantized(2)`",
    "blocks-4bit 0.04": "`density=0.04, codec=Quantized(4)`",
    "blocks-4bit 0.01": "`density=0.01, codec=Quantized(4)`",
    "blocks-4bit 1": "`density=1, codec=Quantized(4)`",
}


def run(board: Board) -> None:
    """Run what the folder of results lacks."""
    for line in board.lines:
        words = f"--example examples/{board.example} --points 5 {line} {board.common}".split()
        words += ["--cache", str(RESULTS.relative_to(HERE.parent))]
        subprocess.run(
            [sys.executable, "-m", "lightning_sparse", "bench", "convergence", *words],
            check=True,
            cwd=HERE.parent,
            stdout=subprocess.DEVNULL,
        )


def markdown() -> str:
    """Every board of which there are results."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    tables = [(board, _table([found for found in results if _belongs(found, board)])) for board in BOARDS]
    return "\n\n".join(f"**{board.title}**\n\n{table}" for board, table in tables if table)


def _belongs(found: dict[str, Any], board: Board) -> bool:
    words = board.common.split()
    arguments = dict(pair.split("=") for pair in words[words.index("--set") + 1 :]) if "--set" in words else {}
    small = {"model_size": "small"}
    return (
        found["example"] == board.example
        and str(found["steps"]) == words[words.index("--steps") + 1]
        and all(str(found.get(key)) == value for key, value in arguments.items())
        and found.get("model_size", "small") == (small | arguments)["model_size"]
    )


def _table(results: list[dict[str, Any]]) -> str:
    """The best learning rate tried of each recipe, against the best dense one on as many ranks and the same seeds."""
    runs: dict[tuple[int, str], dict[float, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for found in results:
        runs[found["world_size"], f"{found['recipe']} {found['density']:g}"][found["lr"]][found["seed"]] = found
    if not runs:
        return ""
    lines = [
        "| ranks | recipe | learning rate | seeds | validation loss | against dense | of dense bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks, recipe in sorted(runs, key=lambda key: (key[0], list(NAMES).index(key[1]))):
        if (ranks, "dense 1") not in runs:
            continue
        dense, own = _best(runs[ranks, "dense 1"]), _best(runs[ranks, recipe])
        seeds = sorted(set(dense) & set(own))
        mine, theirs = fmean(_loss(own[seed]) for seed in seeds), fmean(_loss(dense[seed]) for seed in seeds)
        sent = own[seeds[0]]["curve"]["bytes"][-1] / dense[seeds[0]]["curve"]["bytes"][-1]
        cells = [str(ranks), NAMES[recipe], f"{own[seeds[0]]['lr']:g}", str(len(seeds)), f"{mine:.4f}"]
        lines.append("| " + " | ".join([*cells, f"{mine / theirs - 1:+.2%}", f"{sent:.2%}"]) + " |")
    return "\n".join(lines)


def _best(by_rate: dict[float, dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Runs by seed, of the learning rate that did best on the first seed."""
    return min(by_rate.values(), key=lambda runs: _loss(runs[0]) if 0 in runs else float("inf"))


def _loss(result: dict[str, Any]) -> float:
    """At the end of training."""
    return result["curve"]["losses"][-1]


def main() -> None:
    """Run, then print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="print what is there, run nothing")
    if not parser.parse_args().print:
        for board in BOARDS:
            run(board)
    print(markdown())


if __name__ == "__main__":
    main()
