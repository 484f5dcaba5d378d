"""`bench network` on real namespaces; where the kernel refuses them, its message and its run over loopback instead.

A machine refuses when `Hosts(2)` raises `RefusedError`: unshare, nsenter, ip or tc is missing, neither an ordinary user
nor root may make network namespaces, or the kernel has no bridge, veth or tbf.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_sparse.__main__ import main
from lightning_sparse.bench import network
from lightning_sparse.bench.baselines import HalfDDP, PowerSGDDDP
from lightning_sparse.bench.contenders import USUAL, warmup_of
from lightning_sparse.bench.hosts import Hosts, RefusedError, burst_bytes
from lightning_sparse.bench.network_rows import make_rows
from lightning_sparse.bench.stopwatch import interface_bytes

ROOT = Path(__file__).parents[1]
KEYS = {
    "strategy",
    "hosts",
    "rate_mbit",
    "model",
    "step_seconds",
    "ratio_to_ddp",
    "ratio_to_bound",
    "bytes_per_step",
    "seconds_to_target",
}
TINY = ["bench", "network", "--width", "64", "--steps", "8", "--repeat", "1"]

SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as link:
    begin = time.perf_counter()
    link.sendall(bytes(int(sys.argv[2])))
    link.shutdown(socket.SHUT_WR)
    link.recv(1)
    print(time.perf_counter() - begin)
"""
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    link, _ = server.accept()
    while link.recv(1 << 16):
        pass
    link.sendall(b"!")
"""
EXAMPLE = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import train_lm
train_lm.SIZES["toy"] = 32, 1, 2

def problem(fail_at=None, **options):
    out = train_lm.problem(**options, model_size="toy", batch_size=2)
    out["val"].dataset.length = 20
    step = out["module"].training_step
    def failing(batch):
        if os.environ.get("NODE_RANK") == "1" and out["module"].global_step == fail_at:
            raise RuntimeError("on purpose")
        return step(batch)
    out["module"].training_step = failing
    return out
"""


def refusal() -> str | None:
    try:
        Hosts(2).close()
    except RefusedError as error:
        return str(error)
    return None


REFUSAL = refusal()
needs_hosts = pytest.mark.skipif(REFUSAL is not None, reason=f"no namespaces here: {REFUSAL}")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """The processes that this test has started, whoever their parent is by now."""
    mark = f"BENCH_TEST={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))

    def find() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_text(errors="replace").split("\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    yield find
    for pid in find():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)


@needs_hosts
def test_a_transfer_takes_what_the_rate_allows() -> None:
    numel, rate = 1_000_000, 20
    python = [sys.executable, "-c"]
    with Hosts(2) as hosts:
        for source, target in ((0, 1), (1, 0)):
            seconds = {}
            for limit in (rate, None):
                hosts.limit(limit)
                receive = hosts.inside(target, [*python, RECEIVE, hosts.address(target)])
                send = hosts.inside(source, [*python, SEND, hosts.address(target), str(numel)])
                with subprocess.Popen(receive, stdout=subprocess.PIPE) as receiver:
                    assert receiver.stdout is not None
                    receiver.stdout.readline()
                    seconds[limit] = float(subprocess.check_output(send, timeout=60))
            # a bucket on each side lets one burst through at once
            assert seconds[rate] >= (numel - 2 * burst_bytes(rate)) * 8 / (rate * 1e6)
            assert seconds[None] < seconds[rate]


@pytest.mark.parametrize("refused", [False, True])
def test_every_strategy(
    refused: bool,
    left: Callable[[], list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if refused and REFUSAL is None:

        def refuse(count: int) -> None:
            raise RefusedError("unshare: not permitted")

        monkeypatch.setattr(network, "Hosts", refuse)
    is_loopback = refused or REFUSAL is not None
    out, plot = tmp_path / "made" / "rows.json", tmp_path / "rows.png"
    main([*TINY, "--rate", "50", "unlimited", "--json", str(out), "--plot", str(plot)])
    assert not left()
    rows = json.loads(out.read_text())["rows"]
    printed = capsys.readouterr()
    assert plot.read_bytes().startswith(b"\x89PNG")
    rates = [None] if is_loopback else [50.0, None]
    assert [(row["strategy"], row["rate_mbit"]) for row in rows] == [(name, rate) for rate in rates for name in USUAL]
    assert ("no network namespaces on this machine" in printed.err) == is_loopback
    for row in rows:
        assert row.keys() >= KEYS
        assert row["loopback"] == is_loopback
        assert row["step_seconds"] > 0
        assert (row["bytes_per_step"] is None) == is_loopback
    by_name = {row["strategy"]: row for row in rows if row["rate_mbit"] == rates[0]}
    assert by_name["ddp"]["ratio_to_ddp"] == by_name["alone"]["ratio_to_bound"] == 1
    assert by_name["ddp"]["counted_bytes_per_step"] is None
    if is_loopback:
        return
    dense = 4 * by_name["ddp"]["parameters"]
    # on two ranks a ring sends and receives every gradient once; headers and acknowledgements come on top
    assert 2 * dense < by_name["ddp"]["bytes_per_step"] < 2.4 * dense
    assert dense < by_name["ddp-fp16"]["bytes_per_step"] < 1.4 * dense
    assert by_name["alone"]["bytes_per_step"] < 0.01 * dense
    for name in ("updates", "updates-topk", "gradients"):
        row = by_name[name]
        assert row["counted_bytes_per_step"] < row["bytes_per_step"] < 0.5 * dense
        assert row["exchange_seconds"] > 0


def test_time_to_the_loss_of_ddp(left: Callable[[], list[int]], tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(EXAMPLE)
    out = tmp_path / "rows.json"
    arguments = [*TINY, "--model", "lm", "--example", str(tmp_path / "tiny.py"), "--rate", "unlimited"]
    main([*arguments, "--strategies", "ddp", "updates", "alone", "--json", str(out), "--plot", str(tmp_path / "a.png")])
    dense, ours, alone = json.loads(out.read_text())["rows"]
    assert not left()
    assert dense["val_loss"] == dense["target_loss"] == dense["losses"][-1]
    assert dense["seconds_to_target"] == dense["loss_seconds"][dense["losses"].index(dense["val_loss"])]
    assert len(ours["losses"]) == len(ours["loss_seconds"]) == 8
    assert alone["val_loss"] is None
    assert alone["seconds_to_target"] is None


def test_a_failing_rank_ends_all(left: Callable[[], list[int]], tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(EXAMPLE)
    arguments = [*TINY, "--model", "lm", "--example", str(tmp_path / "tiny.py"), "--set", "fail_at=2"]
    with pytest.raises(SystemExit, match=r"rank 1 of 2 failed: RuntimeError: on purpose\n[\s\S]*in failing"):
        main([*arguments, "--strategies", "ddp", "--rate", "100"])
    assert not left()


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_bench_leaves_nothing(number: signal.Signals, left: Callable[[], list[int]]) -> None:
    command = [sys.executable, "-m", "lightning_sparse", *TINY[:-4], "--steps", "100000", "--strategies", "updates"]
    ours = os.readlink("/proc/self/ns/net")
    bench = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)

    def trains() -> bool:
        assert bench.poll() is None
        moved = 0
        for pid in left():
            with contextlib.suppress(OSError, ValueError):
                # this machine may have an interface of that name too
                if os.readlink(f"/proc/{pid}/ns/net") == ours:
                    continue
                moved = max(moved, interface_bytes("eth0", Path(f"/proc/{pid}/net/dev")))
        return moved > 200_000

    wait_for(trains, 120, "traffic between ranks")
    namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in left()}
    # this machine's, the bridge's, and one a host
    assert len(namespaces) == 4
    bench.send_signal(number)
    assert bench.wait(60) != 0
    wait_for(lambda: not left(), 20, "the end of all processes")

    def used() -> set[str]:
        """The namespaces some process is in."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(path))
        return found

    # what ends on the end of its input takes a moment
    wait_for(lambda: not used() & (namespaces - {ours}), 20, "the end of all namespaces")


def test_rows_by_hand() -> None:
    def training(seconds: list[list[float]], losses: list[float]) -> list[dict]:
        curve = [(step + 1, loss) for step, loss in enumerate(losses)]
        laps = [[{"seconds": x, "bytes": 10.0 * x} for x in rank] for rank in seconds]
        return [{"laps": rank, "curve": curve, "parameters": 7} for rank in laps]

    warm = [1.0] * warmup_of("ddp")
    slow = training([warm + [4.0, 2.0], warm + [1.0, 3.0]], [6.0, 5.0, 4.0, 3.0, 2.0, 1.5])
    fast = training([warm + [1.0, 0.5], warm + [0.5, 0.5]], [6.0, 5.0, 4.0, 3.0, 1.5, 1.4])
    common = {"hosts": 2, "rate_mbit": None}
    dense, ours, alone = make_rows({"ddp": [slow], "updates": [fast, slow, fast], "alone": [fast]}, common, 0.0)
    assert dense["step_seconds"] == 3.0
    assert ours["step_seconds"] == alone["step_seconds"] == 0.75
    assert ours["max_step_seconds"] == 3.0
    assert ours["ratio_to_ddp"] == 4.0
    assert dense["ratio_to_bound"] == 0.25
    assert ours["bytes_per_step"] == pytest.approx(10 * (1 + 0.5 + 0.5 + 0.5) / 4)
    assert ours["counted_bytes_per_step"] is None
    # the slowest rank of each step: four warm-up seconds and the fifth step, or all six
    assert dense["seconds_to_target"] == 4 + 4 + 3
    assert ours["seconds_to_target"] == 4 + 1
    assert make_rows({"ddp": [slow], "updates": [fast]}, common, 0.5)[1]["seconds_to_target"] == 5.0
    heavy = training([warm + [1.0]], [])
    heavy[0]["laps"][0]["bytes"] = 1e9
    with pytest.raises(RuntimeError, match=r"updates: expected at most \d+ bytes in 5.000 s at 0.1 Mbit/s, got 1000"):
        make_rows({"updates": [heavy]}, {"rate_mbit": 0.1}, 0.0)


@pytest.mark.parametrize(("make", "calls"), [(HalfDDP, 7), (PowerSGDDDP, 7), (PowerSGDDDP, 16)])
def test_hooks_that_lightning_drops_are_found_out(make: type[HalfDDP], calls: int) -> None:
    strategy = make()
    strategy.calls = calls
    with pytest.raises(RuntimeError, match=f"{make.__name__}: expected .* got {calls}"):
        strategy.check(8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "4"], "--steps must be a multiple of 4 above 4, got 4"),
        (["--hosts", "1"], "--hosts must be in 2 to 250, got 1"),
        (["--model", "lm", "--example", "missing.py"], "expected an example script, got missing.py"),
    ],
)
def test_options_out_of_range(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["bench", "network", *arguments])


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RefusedError, match="not installed: unshare, nsenter, ip, tc"):
        Hosts(2)


def test_interface_bytes(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text("head |\n face |bytes\n  lo: 1 2 0 0 0 0 0 0 4 5 0\neth0:100 2 0 0 0 0 0 0 23 5 0\n")
    assert interface_bytes("eth0", table) == 123
    with pytest.raises(ValueError, match="expected an interface of this host, got 'eth1'"):
        interface_bytes("eth1", table)
