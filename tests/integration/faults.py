"""Injects a fault into one of two ranks that train, and reports how each of them ended.

python tests/integration/faults.py                   # 60 faults, a table, some minutes
python tests/integration/faults.py --run FOLDER TAP FAULT STEP RANK     # one of them (Lightning starts the other rank)
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls

ROOT = Path(__file__).parents[2]
FAULTS = ("kill", "raise", "stall", "nan", "corrupt", "interrupt")
TAPS = ("updates", "gradients")
STEPS, TIMEOUT = 12, 6.0
PATIENCE = 90.0
"""Seconds that a run may take, starting its processes included."""


class Ended(NamedTuple):
    """How one run ended: seconds, exit status of each process known, what the ranks wrote, what the last file holds."""

    seconds: float
    codes: dict[int, int]
    ranks: dict[int, dict[str, Any]]
    text: str
    saved: str


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


class Fault(pl.Callback):
    """Does what it is named for, on one rank, once ``step`` steps were made."""

    def __init__(self, fault: str, step: int, rank: int) -> None:
        self.fault, self.step, self.rank = fault, step, rank

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        if trainer.global_step != self.step or trainer.global_rank != self.rank:
            return
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "interrupt":
            # Ctrl-C reaches every process of the terminal
            os.killpg(0, signal.SIGINT)
        if self.fault == "stall":
            time.sleep(10 * PATIENCE)
        if self.fault == "raise":
            loss.register_hook(_fail)
        if self.fault == "nan":
            loss.register_hook(lambda gradient: gradient * torch.nan)


def _fail(_: Tensor) -> None:
    raise ArithmeticError("the user's own error")


class Patient(ls.SparseDDPStrategy):
    """Ranks may start further apart than the timeout, on a busy machine; it holds from when they have met."""

    def setup_distributed(self) -> None:
        timeout, self._timeout = self._timeout, timedelta(seconds=PATIENCE)
        super().setup_distributed()
        self._timeout = timeout
        torch.distributed.distributed_c10d._set_pg_timeout(timeout)


def train(folder: Path, tap: str, fault: str, step: int, rank: int) -> None:
    """Train with the fault; what became of this rank goes into a file of its own."""
    out: dict[str, Any] = {"error": None}
    exchange = ls.Updates() if tap == "updates" else ls.Gradients()
    strategy = Patient(exchange=exchange, timeout=timedelta(seconds=TIMEOUT))
    x = torch.randn(8 * 2 * STEPS, 32, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.tanh(x[:, :10])), batch_size=8)
    path = folder / "corrupt.ckpt"
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        callbacks=[
            Fault(fault, step, rank),
            ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1),
            OnExceptionCheckpoint(folder),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net()
    try:
        trainer.fit(net, loader, ckpt_path=path if fault == "corrupt" else None)
        out["skipped"] = trainer.strategy.summary()["skipped"]
    except BaseException as error:
        out["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        out["threads"] = [thread.name for thread in threading.enumerate()]
        out["finite"] = all(bool(p.isfinite().all()) for p in net.parameters())
        me = int(os.environ.get("LOCAL_RANK", "0"))
        # this process may be killed at any time from here on
        part = folder / f"rank{me}.part"
        part.write_text(json.dumps(out))
        part.replace(folder / f"rank{me}.json")


def damage(folder: Path, step: int) -> None:
    """A checkpoint whose state is not whole, in one of several ways."""
    state = {"version": 2, "kind": "mean", "exchange": "updates", "shared": {}, "cut": {}, "owed": {}, "layout": {}}
    ways: tuple[Any, ...] = (
        {**state, "version": 7},
        {**state, "owed": {"progress": {"layers.0.weight": torch.zeros(3)}}},
        {"version": 2},
        {**state, "layout": {"progress": ["layers.0.weight"]}},
        [1, 2, 3],
    )
    net = Net()
    optimizer = net.configure_optimizers()
    checkpoint = {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": pl.__version__,
        "sparse_ddp": ways[step % len(ways)],
    }
    torch.save(checkpoint, folder / "corrupt.ckpt")


def inject(folder: Path, tap: str, fault: str, step: int, rank: int) -> Ended:
    """One run with one fault, in a session of its own; nothing of it is left when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    if fault == "corrupt":
        damage(folder, step)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--run", str(folder), tap, fault, str(step), str(rank)]
    begun = time.monotonic()
    with (folder / "out.txt").open("w+") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            codes = {0: process.wait(PATIENCE)}
        except subprocess.TimeoutExpired:
            codes = {}
        seconds = time.monotonic() - begun
        # ranks that do not depend on the first one have their timeout too
        while _alive(process.pid) and time.monotonic() - begun < PATIENCE and fault != "stall":
            time.sleep(0.1)
        if _alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        text = out.read()
    ranks = {int(p.stem[4:]): json.loads(p.read_text()) for p in folder.glob("rank*.json")}
    return Ended(seconds, codes, ranks, text, _saved(folder / "on_exception.ckpt"))


def _saved(path: Path) -> str:
    """What is wrong with a file saved on the way out; empty if nothing is, "none" if there is no file."""
    if not path.exists():
        return "none"
    checkpoint = torch.load(path, weights_only=True)
    Net().load_state_dict(checkpoint["state_dict"])
    finite = all(bool(x.isfinite().all()) for x in checkpoint["state_dict"].values())
    return "" if finite and checkpoint["sparse_ddp"]["kind"] == "none" else "damaged"


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def verdict(fault: str, rank: int, ended: Ended) -> str:
    """What is wrong with how a run ended; empty if it is as documented."""
    other = 1 - rank
    if not ended.codes:
        return f"still running after {PATIENCE:.0f} s"
    if fault == "nan":
        good = ended.codes[0] == 0 and all(x["error"] is None and x["finite"] for x in ended.ranks.values())
        return "" if good and len(ended.ranks) == 2 and ended.ranks[rank]["skipped"] == 1 else "did not go on"
    if fault == "corrupt":
        errors = [x["error"] or "" for x in ended.ranks.values()]
        return "" if errors and all("expected" in error for error in errors) else f"not refused: {errors}"
    if ended.codes[0] == 0:
        return "ended as if nothing had happened"
    if ended.saved == "damaged" or (ended.saved == "none" and (fault == "interrupt" or (fault, rank) == ("raise", 0))):
        return f"the file of the first rank is {ended.saved}"
    if fault == "interrupt":
        names = {x["error"].split(":")[0] for x in ended.ranks.values()}
        return (
            ""
            if names <= {"SystemExit", "KeyboardInterrupt"} and "Traceback" not in ended.text
            else f"not clean: {names}"
        )
    if fault == "raise" and "the user's own error" not in (ended.ranks.get(rank, {}).get("error") or ""):
        return "the error was lost"
    # Lightning ends the second rank when the first one has died of an error, and the other way round
    error = ended.ranks.get(other, {}).get("error")
    if error is not None and "another rank has ended" not in error and "Connection" not in error:
        return f"rank {other} does not say why: {error[:200]}"
    if any("lightning_sparse" in x["threads"] for x in ended.ranks.values()):
        return "the worker outlived the Trainer"
    return ""


def main() -> None:
    """Inject 60 faults and print how each kind ended."""
    import tempfile

    draw = random.Random(0)
    rows: dict[tuple[str, str], list[tuple[float, str]]] = {}
    cases = [
        (fault, TAPS[i % 2], draw.randrange(1, STEPS - 1), draw.randrange(2)) for fault in FAULTS for i in range(10)
    ]
    with tempfile.TemporaryDirectory() as base:
        for position, (fault, tap, step, rank) in enumerate(track(cases, console=Console(stderr=True))):
            ended = inject(Path(base) / str(position), tap, fault, step, rank)
            wrong = verdict(fault, rank, ended)
            rows.setdefault((fault, tap), []).append((ended.seconds, wrong))
            if wrong:
                print(f"{fault} {tap} at step {step} on rank {rank}: {wrong}\n{ended.text[-1500:]}", file=sys.stderr)
    table = Table("fault", "exchange", "runs", "as documented", "longest, s")
    for (fault, tap), found in rows.items():
        good = sum(not wrong for _, wrong in found)
        table.add_row(fault, tap, str(len(found)), str(good), f"{max(seconds for seconds, _ in found):.1f}")
    Console().print(table)
    if any(wrong for found in rows.values() for _, wrong in found):
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        train(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
