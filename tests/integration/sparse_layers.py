"""Sparse layers under DDP and both taps on two real ranks, blocks moving all the while; writes what each rank saw.

python tests/integration/sparse_layers.py FOLDER       # Lightning starts the other rank
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

import lightning_sparse as ls
from lightning_sparse.checksum import ranks_equal
from lightning_sparse.nn import NM, BlockSparseLinear
from tests.integration.modes import Mode, Net, train

EVERY = 4


class Moving(Net):
    """A block-sparse and a 2:4 layer; every few steps the weakest block gives way to the one of largest gradient."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            # Lightning seeds no ranks: the largest blocks are elsewhere on each of them
            torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
            self.body[0] = BlockSparseLinear.from_linear(torch.nn.Linear(32, 64), block=16, density=0.5)
        self.head = NM(64, 10, decay=2e-4)
        self.moved = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.body[0].records_dead_gradient = batch_idx % EVERY == EVERY - 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layer = self.body[0]
        if not layer.records_dead_gradient:
            return
        weights, gradients = layer.weight_scores(), layer.dead_gradient
        # ranks decide on the same numbers
        dist.all_reduce(weights)
        dist.all_reduce(gradients)
        mask = layer.block_mask
        dead = (~mask).nonzero()[gradients.flatten(1).norm(dim=1).argmax()]
        live = mask.nonzero()[weights[mask].argmin()]
        mask[tuple(dead)], mask[tuple(live)] = True, False
        assert layer.set_block_mask_(mask, self.optimizers().optimizer) == (1, 1)
        self.moved += 1


class Seen(Moving):
    """Keeps itself where the script finds it."""

    last: Seen

    def __init__(self) -> None:
        super().__init__()
        Seen.last = self


def run(folder: Path) -> None:
    """Each strategy, with the modules that it leaves behind."""
    faulthandler.dump_traceback_later(280, exit=True)
    makers = {
        "ddp": pl.strategies.DDPStrategy,
        "updates": lambda: ls.SparseDDPStrategy(exchange=ls.Updates()),
        "gradients": lambda: ls.SparseDDPStrategy(exchange=ls.Gradients(), density=0.1),
    }
    results = {}
    for way, make in makers.items():
        results[way] = train(Mode(Seen), make)
        layer = Seen.last.body[0]
        results[way] |= {"moved": Seen.last.moved, "mask": layer.block_mask.int().tolist(), "equal": ranks_equal(layer)}
        results[way]["output"] = layer(torch.linspace(-1, 1, 32)).tolist()
    (folder / f"layers{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
