"""Runs what the README's tables of losses need, keeps each finished run, and prints the tables as Markdown.

python examples/tables.py                 # runs what is missing, then prints (about twenty minutes on two cores)
python examples/tables.py --print         # prints what is there
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).parent
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Case:
    """One line of a table: a name, and the arguments that reproduce it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Board:
    """One table: a script, what all its lines share, and the seeds they are averaged over."""

    title: str
    script: str
    arguments: str
    seeds: int
    cases: tuple[Case, ...]


DDP = Case("`ddp`", "--strategy ddp")
DEFAULT = Case("`sparse_ddp`, default (updates)", "--strategy sparse_ddp")
RESIDUAL = Case("`Gradients` + `Residual`", "--strategy sparse_ddp --exchange gradients")
MOMENTUM = Case("`Gradients` + `MomentumResidual`", "--strategy sparse_ddp --exchange gradients --memory momentum")
BOARDS = {
    "lm-300": Board("Language model, AdamW, 300 steps", "train_lm.py", "--max-steps 300", 3, (DDP, DEFAULT)),
    "lm-1000": Board(
        "Language model, AdamW, 1000 steps",
        "train_lm.py",
        "--max-steps 1000",
        1,
        (DDP, DEFAULT, RESIDUAL, MOMENTUM),
    ),
    "digits": Board(
        "Digits, SGD with momentum, 300 steps",
        "train_digits.py",
        "--max-steps 300",
        3,
        (DDP, DEFAULT, RESIDUAL, MOMENTUM),
    ),
}


def runs(key: str) -> list[tuple[Case, Path, list[str]]]:
    """Every run of a board: its case, where its result lies, and the command that makes it."""
    board, out = BOARDS[key], []
    for position, case in enumerate(board.cases):
        for seed in range(board.seeds):
            path = RESULTS / f"{key}-{position}-{seed}.json"
            arguments = f"--devices 2 --quiet --seed {seed} {board.arguments} {case.arguments}"
            out.append((case, path, [board.script, *arguments.split()]))
    return out


def run(key: str, progress: Progress) -> None:
    """Run what is missing; a result is written only once its run has ended."""
    todo = [(path, command) for _, path, command in runs(key) if not path.exists()]
    bar = progress.add_task(BOARDS[key].title, total=len(todo))
    for path, command in todo:
        subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:], "--json", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        row = json.loads(path.read_text())
        path.write_text(json.dumps({"command": "python examples/" + " ".join(command), **row}, indent=2) + "\n")
        progress.advance(bar)


def markdown(key: str) -> str:
    """The board's table: means over seeds, and the loss against the first line's."""
    board = BOARDS[key]
    rows: dict[Case, list[dict[str, Any]]] = {}
    for case, path, _ in runs(key):
        if path.exists():
            rows.setdefault(case, []).append(json.loads(path.read_text()))
    accuracy = board.script == "train_digits.py"
    head = ["", "validation loss", "against the first line", "MB per step", "of dense"] + (
        ["accuracy"] if accuracy else []
    )
    lines = [f"**{board.title}**, 2 ranks, mean of {board.seeds} seed(s)", "", " | ".join(["", *head, ""]).strip()]
    lines.append("|" + "---|" * len(head))
    first = mean(rows[board.cases[0]], "val_loss") if board.cases[0] in rows else float("nan")
    for case, found in rows.items():
        loss, sent = mean(found, "val_loss"), mean(found, "bytes_per_step")
        cells = [case.name, f"{loss:.4f}", f"{100 * (loss / first - 1):+.2f} %", f"{sent / 1e6:.3f}"]
        cells.append(f"{100 * sent / mean(found, 'dense_bytes_per_step'):.2f} %")
        cells += [f"{100 * mean(found, 'val_accuracy'):.2f} %"] if accuracy else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean(rows: list[dict[str, Any]], key: str) -> float:
    """Mean of a key over runs."""
    return statistics.fmean(row[key] for row in rows)


def main() -> None:
    """Run, then print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("boards", nargs="*", choices=[*BOARDS, []], help="which boards; unset: all")
    parser.add_argument("--print", action="store_true", help="print what is there, run nothing")
    options = parser.parse_args()
    keys = options.boards or list(BOARDS)
    if not options.print:
        with Progress(console=Console(stderr=True)) as progress:
            for key in keys:
                run(key, progress)
    print("\n\n".join(markdown(key) for key in keys))


if __name__ == "__main__":
    main()
