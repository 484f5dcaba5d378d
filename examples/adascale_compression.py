"""Measures what compression does to AdaScale's estimates, on the digits of train_digits.py and virtual ranks.

python examples/adascale_compression.py --json FILE

Three estimates of the same steps are compared: from the mean of the ranks' gradients, as dense training would see it;
from their sketches, as AdaScaleLR does; and from the mean that arrives after compression.
"""

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from common import versions
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from train_digits import problem

from lightning_sparse.arguments import is_linear
from lightning_sparse.bench.recipes import RECIPES, Recipe
from lightning_sparse.bench.simulate import GradientBucket
from lightning_sparse.communicators import VirtualRanks
from lightning_sparse.optim.gain import Gain
from lightning_sparse.optim.sketch import sketch
from lightning_sparse.protocols import Transport
from lightning_sparse.random import Draw
from lightning_sparse.reducer import Reducer
from lightning_sparse.schedules import constant
from lightning_sparse.sync import Gradients, Updates
from lightning_sparse.sync.gradients import GradientsTap
from lightning_sparse.sync.updates_tap import UpdatesTap

Row = dict[str, Any]
NAMES = ("exact", "sketch", "arrived")
CASES = [
    ("dense", 1.0),
    ("gradients", 0.1),
    ("gradients", 0.01),
    ("gradients-forgetful", 0.01),
    ("gradients-4bit", 0.25),
    ("updates", 0.01),
    ("blocks-1bit", 0.25),
]


def measure(recipe: Recipe, density: float, transport: Transport, options: argparse.Namespace) -> dict[str, Gain]:
    """Train one rank; the gains that the three estimates give, over the last ``--over`` steps or so."""
    setup = problem(options.seed, options.lr, options.steps, transport.world_size)
    module = copy.deepcopy(setup["module"])
    module.log = lambda *_, **__: None
    optimizer = torch.optim.SGD(module.parameters(), options.lr, momentum=0.9)
    weights = list(module.parameters())
    share = constant(1.0 if recipe.exchange is None else density)
    parts = (recipe.compressor, recipe.codec, recipe.communicator)
    reducer = Reducer(*parts, transport, share, torch.device("cpu"))
    tap: Any
    if isinstance(recipe.exchange, Updates):
        tap = UpdatesTap(recipe.exchange, reducer, module, [optimizer], is_linear)
    else:
        tap = GradientsTap(recipe.exchange or Gradients(), reducer, recipe.memory(), module, False, lambda: 1.0)
    mine = Subset(setup["train"].dataset, range(transport.rank, len(setup["train"].dataset), transport.world_size))
    generator = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(mine, 32, shuffle=True, drop_last=True, generator=generator)
    ranks = transport.world_size
    keep = 1 - 1 / options.over
    gains = {name: Gain(1, ranks, ranks, keep) for name in ("exact", "sketch", "arrived")}
    step = 0
    while step < options.steps:
        for batch in loader:
            optimizer.zero_grad()
            module.training_step(batch).backward()
            own = torch.cat([p.grad.flatten() for p in weights])
            exact = reducer.submit_mean(own.clone()).result()
            mean = reducer.submit_mean(sketch([own], [0], 1, Draw(0, step, "gain"))).result()
            arrived: Tensor = torch.full((1,), math.nan)
            if isinstance(tap, GradientsTap):
                bucket = GradientBucket(weights)
                tap.hook(None, bucket).wait()
                tap.check()
                bucket.write()
                arrived = bucket.buffer()
            each = reducer.submit_mean(own.square().sum().view(1)).result()
            for name, x in (("exact", exact), ("sketch", mean), ("arrived", arrived)):
                gains[name].update([float(each)], [float(x.double().square().sum())], ranks)
            tap.before_step(optimizer)
            optimizer.step()
            tap.after_step(optimizer)
            step += 1
            if step == options.steps:
                break
    reducer.close()
    return gains


def row(recipe: str, density: float, options: argparse.Namespace) -> Row:
    """One case."""

    def rank(transport: Transport) -> dict[str, Gain]:
        torch.set_num_threads(1)
        return measure(RECIPES[recipe], density, transport, options)

    gains = VirtualRanks(options.ranks).run(rank)[0]
    out: Row = {"recipe": recipe, "density": density, "ranks": options.ranks, "steps": options.steps}
    for name, gain in gains.items():
        if name == "arrived" and gain.mean == gain.variance == 0:
            # no mean gradient is ever formed
            continue
        out |= {f"{name}_gain": gain.value, f"{name}_variance": gain.variance, f"{name}_mean": gain.mean}
    return out | {"seed": options.seed, "versions": versions()}


def table(rows: list[Row]) -> Table:
    """Gain, variance and mean of each estimate."""
    columns = ["exchange", "density", *(f"{k}: {v}" for k in ("gain", "variance", "mean") for v in NAMES)]
    out = Table(*columns, title=f"AdaScale's estimates, {rows[0]['ranks']} ranks, {rows[0]['steps']} steps")
    for entry in rows:
        figures = [entry.get(f"{name}_{key}") for key in ("gain", "variance", "mean") for name in NAMES]
        out.add_row(entry["recipe"], f"{entry['density']:g}", *("" if x is None else f"{x:.3g}" for x in figures))
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--over", type=int, default=100, help="steps that the running means reach back")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        rows.append(row(*case, options))
        Console().print(table(rows[-1:]))
    Console().print(table(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
