"""`bench convergence`: the loss that recipes reach on virtual ranks, beside dense training, at what bytes."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from lightning_sparse.bench import kit
from lightning_sparse.bench.example import load_problem, parse_arguments
from lightning_sparse.bench.recipes import RECIPES
from lightning_sparse.bench.simulate import Problem, simulate
from lightning_sparse.version import __version__

Case = dict[str, Any]


def add_parser(names: Any) -> None:
    """Adds `convergence` to the benches."""
    parser = names.add_parser("convergence", help="losses of recipes on virtual ranks")
    parser.add_argument("--example", type=Path, default=Path("examples/train_lm.py"), help="script with `problem`")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["dense", "updates", "gradients"])
    parser.add_argument("--ranks", type=kit.count, nargs="+", default=[2])
    parser.add_argument("--density", type=kit.fraction, nargs="+", default=[0.01])
    parser.add_argument("--lr", type=kit.positive, nargs="+", default=[1e-3], help="dense is judged by its best one")
    parser.add_argument("--steps", type=kit.count, nargs="+", default=[300])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="more arguments of `problem`")
    parser.add_argument("--points", type=kit.count, default=10, help="validations in a run")
    parser.add_argument("--cache", type=Path, default=Path("out/convergence"), help="finished runs")
    parser.add_argument("--quick", action="store_true", help="20 steps, 2 validations")
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    kit.add_outputs(parser, "draw loss over bytes and over steps as a PNG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs what the cache lacks, prints the table, and writes what the options ask for."""
    pyplot = kit.pyplot() if options.plot else None
    if options.quick:
        options.steps, options.points = [20], 2
    make = load_problem(options.example)
    options.cache.mkdir(parents=True, exist_ok=True)
    results = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for case in progress.track(_cases(options), description="runs"):
            results.append(_cached(case, options, make, progress))
    rows = _rows(results)
    formats: dict[str, Callable[[Any], str]] = {
        "strategy": str,
        "world_size": str,
        "density": "{:g}".format,
        "lr": "{:g}".format,
        "steps": str,
        "seed": str,
        "val_loss": "{:.4f}".format,
        "against_dense": "{:+.2%}".format,
        "bytes_over_dense": "{:.4f}".format,
    }
    kit.print_table(f"{options.example.name} on virtual ranks", rows, formats)
    if options.json:
        kit.write_json(options.json, rows, torch.device("cpu"))
    if pyplot:
        _plot(pyplot, results, options.plot)


def _cases(options: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    axes = (options.steps, options.ranks, options.lr, options.seeds, options.recipes, options.density)
    for steps, ranks, lr, seed, recipe, density in itertools.product(*axes):
        # dense training has one density
        share = 1.0 if RECIPES[recipe].exchange is None else density
        case = {"recipe": recipe, "world_size": ranks, "density": share, "lr": lr, "steps": steps, "seed": seed}
        if case not in cases:
            cases.append(case)
    return cases


def _cached(case: Case, options: argparse.Namespace, make: Any, progress: Progress) -> Case:
    arguments = parse_arguments(options.set)
    key = {"example": options.example.name, **arguments, "points": options.points, **case}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    label = f"{options.example.stem}-{case['recipe']}-{case['world_size']}ranks-{case['steps']}steps"
    path = options.cache / f"{label}-{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    bar = progress.add_task(f"{case['recipe']}, {case['world_size']} ranks, seed {case['seed']}", total=case["steps"])
    problem = Problem(
        **make(seed=case["seed"], lr=case["lr"], max_steps=case["steps"], world_size=case["world_size"], **arguments)
    )
    curve = simulate(
        problem,
        RECIPES[case["recipe"]],
        case["world_size"],
        case["density"],
        case["steps"],
        options.points,
        lambda: progress.advance(bar),
    )
    progress.remove_task(bar)
    parameters = sum(p.numel() for p in problem.module.parameters() if p.requires_grad)
    result = {
        "command": _command(case, options),
        **key,
        "parameters": parameters,
        "curve": vars(curve),
        "version": __version__,
        "torch": torch.__version__,
    }
    # written whole or not at all, so that an interrupted run is run again
    path.with_suffix(".tmp").write_text(json.dumps(result) + "\n")
    path.with_suffix(".tmp").replace(path)
    return result


def _command(case: Case, options: argparse.Namespace) -> str:
    """What runs this case alone."""
    words = [f"python -m lightning_sparse bench convergence --example {options.example} --points {options.points}"]
    words += [f"--recipes {case['recipe']} --ranks {case['world_size']} --density {case['density']}"]
    words += [f"--lr {case['lr']} --steps {case['steps']} --seeds {case['seed']}"]
    return " ".join([*words, *(["--set", *options.set] if options.set else [])])


def _rows(results: list[Case]) -> list[kit.Row]:
    """One row a run; its dense loss is that of the best learning rate tried at its steps, ranks and seed."""
    dense: dict[tuple[int, int, int], tuple[float, float]] = {}
    for result in results:
        if RECIPES[result["recipe"]].exchange is None:
            key, curve = _key(result), result["curve"]
            found = curve["losses"][-1], curve["bytes"][-1]
            dense[key] = min(found, dense.get(key, found))
    rows = []
    for result in results:
        curve = result["curve"]
        best, sent = dense.get(_key(result), (float("nan"), float("nan")))
        reached = (count for loss, count in zip(curve["losses"], curve["bytes"], strict=True) if loss <= best)
        rows.append(
            {
                "example": result["example"],
                "strategy": result["recipe"],
                "compressor": str(RECIPES[result["recipe"]].compressor),
                "world_size": result["world_size"],
                "density": result["density"],
                "lr": result["lr"],
                "steps": result["steps"],
                "seed": result["seed"],
                "val_loss": curve["losses"][-1],
                "dense_val_loss": best,
                "against_dense": curve["losses"][-1] / best - 1,
                "bytes_per_step": curve["bytes"][-1] / result["steps"],
                "bytes_over_dense": curve["bytes"][-1] / sent,
                "bytes_to_target": next(reached, None),
            }
        )
    return rows


def _key(result: Case) -> tuple[int, int, int]:
    return result["steps"], result["world_size"], result["seed"]


def _plot(pyplot: Any, results: list[Case], path: Path) -> None:
    figure, (over_steps, over_bytes) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for result in results:
        curve, dense = result["curve"], RECIPES[result["recipe"]].exchange is None
        label = f"{result['recipe']}, {result['world_size']} ranks, density {result['density']:g}, lr {result['lr']:g}"
        style = {"linestyle": "--" if dense else "-", "marker": ".", "label": label}
        over_steps.plot(curve["steps"], curve["losses"], **style)
        over_bytes.plot([count / 1e6 for count in curve["bytes"]], curve["losses"], **style)
    over_steps.set(xlabel="step", ylabel="validation loss")
    over_bytes.set(xlabel="MB sent and received per rank", xscale="log")
    for axes in (over_steps, over_bytes):
        axes.grid(alpha=0.3)
    over_bytes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
