"""Options of `bench network`."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from lightning_sparse.bench import kit
from lightning_sparse.bench.contenders import BOUND, CONTENDERS, USUAL, warmup_of
from lightning_sparse.bench.example import load_problem, parse_arguments

WARMUP = warmup_of(BOUND)
POINTS = 10  # validations in a run
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds them to a parser."""
    parser.add_argument("--hosts", type=int, default=2, help="network namespaces, one rank each (default: 2)")
    parser.add_argument("--rate", type=_rate, nargs="+", default=[100.0, 1000.0, None], help="Mbit/s, or unlimited")
    parser.add_argument("--model", choices=["lm", "mlp"], default="mlp", help="a language model, or square layers")
    parser.add_argument(
        "--width", type=kit.count, default=2048, help="of mlp's 6 layers (default: 2048, 25 M parameters)"
    )
    parser.add_argument(
        "--example", type=Path, default=EXAMPLE, help="script whose `problem` is lm (default: %(default)s)"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="arguments of `problem`")
    parser.add_argument("--strategies", nargs="+", choices=CONTENDERS, default=USUAL)
    parser.add_argument(
        "--steps", type=int, help=f"of each training, a multiple of {WARMUP}: the first {WARMUP} warm up (24; lm: 300)"
    )
    parser.add_argument("--repeat", type=kit.count, default=3, help="trainings of each strategy, in turns (default: 3)")
    parser.add_argument(
        "--slack", type=float, default=0.0, help="target loss over ddp's last, such as 0.01 (default: 0)"
    )
    parser.add_argument(
        "--threads", type=kit.count, default=None, help="CPU threads of a rank (default: cores / hosts)"
    )
    parser.add_argument("--quick", action="store_true", help="one rate, one repeat, few steps; mlp: width 256")
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    kit.add_outputs(parser, "draw step time over rate, and lm's loss over time")


def complete(options: argparse.Namespace) -> None:
    """Fill in what depends on other options, and refuse what cannot be run.

    Raises:
        SystemExit: an option is out of range, or there is no example script.
    """
    if options.quick:
        options.rate, options.repeat, options.steps = options.rate[:1], 1, options.steps or 2 * WARMUP
        options.width = min(options.width, 256)
    if options.steps is None:
        options.steps = 300 if options.model == "lm" else 24
    if options.steps <= WARMUP or options.steps % WARMUP:
        # local steps exchange every WARMUP steps, and all of what they do must be timed
        raise SystemExit(f"bench network: --steps must be a multiple of {WARMUP} above {WARMUP}, got {options.steps}")
    for name in options.strategies:
        if options.steps <= warmup_of(name):
            raise SystemExit(
                f"bench network: --strategies {name} warms up for {warmup_of(name)} steps, got --steps {options.steps}"
            )
    if not 2 <= options.hosts <= 250:
        raise SystemExit(f"bench network: --hosts must be in 2 to 250, got {options.hosts}")
    if options.threads is None:
        options.threads = max(1, (os.cpu_count() or 1) // options.hosts)
    options.arguments = parse_arguments(options.set)
    if options.model == "lm":
        # found missing here, and not by every rank
        load_problem(options.example)


def validation_interval(steps: int) -> int:
    """Smallest divisor of ``steps`` that gives at most `POINTS` validations, so that the last step is validated."""
    return next(n for n in range(math.ceil(steps / POINTS), steps + 1) if steps % n == 0)


def _rate(text: str) -> float | None:
    if text == "unlimited":
        return None
    rate = float(text)
    if not 0.1 <= rate < math.inf:
        raise argparse.ArgumentTypeError(f"expected Mbit/s from 0.1, or unlimited, got {text}")
    return rate
