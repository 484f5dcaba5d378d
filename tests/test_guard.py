"""The guard's decisions, on clusters that are a few numbers each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_sparse.codecs import Quantized, Raw
from lightning_sparse.communicators import CompressedAllReduce
from lightning_sparse.compressors import TopK, WeightBlocks
from lightning_sparse.graph import is_reentrant
from lightning_sparse.guard import Guard
from lightning_sparse.ladder import Ladder, Rung, make_rungs
from lightning_sparse.protocols import Communicator


@dataclass
class Cluster:
    """What a step takes: computation, all-reduce of all gradients, and exchange on every ``cycle``-th step."""

    compute: float
    link: float
    exchange: float
    cycle: int = 1
    hidden: float = 0.0
    """The part of the computation that DDP hides its all-reduce behind."""
    said: list[str] = field(default_factory=list)
    probes: int = 0

    def __post_init__(self) -> None:
        self.guard = Guard(self.cycle, self._probe, lambda numbers: list(numbers), self.said.append)
        self.total = 0.0

    def _probe(self) -> float:
        self.probes += 1
        return self.link

    def step(self, number: int) -> None:
        busy = self.exchange if number % self.cycle == 0 else 0.0
        if self.guard.is_dense:
            busy, seconds = 0.0, self.compute + max(0.0, self.link - self.hidden * self.compute)
        else:
            seconds = self.compute + busy
        # one step in ten waits for something else
        seconds += 50.0 if number % 10 == 5 else 0.0
        self.guard.lap(seconds, busy)

    def run(self, steps: int) -> list[bool]:
        out = []
        for number in range(steps):
            self.step(number)
            out.append(self.guard.is_dense)
        return out


def test_a_slow_link_keeps_the_exchange_and_never_sees_ddp() -> None:
    cluster = Cluster(compute=0.25, link=8.0, exchange=0.2)
    assert not any(cluster.run(5000))
    assert len(cluster.said) == 1, "decisions are said once"
    assert "0.4500 s, of which the exchange 0.2000 s" in cluster.said[0]


@pytest.mark.parametrize("cycle", [1, 4])
def test_a_fast_link_takes_ddp(cycle: int) -> None:
    cluster = Cluster(compute=0.25, link=0.01, exchange=0.2, cycle=cycle)
    dense = cluster.run(5000)
    assert dense.index(True) == 9 + 40 * cycle
    assert all(dense[9 + 40 * cycle :])
    assert cluster.guard.measured["ddp"] == pytest.approx(0.26)
    assert cluster.guard.measured["exchange"] == pytest.approx(0.2 / cycle)


def test_a_trial_that_shows_ddp_slower_ends_and_is_not_made_again() -> None:
    """Predicted in DDP's favour, an all-reduce hides behind the computation; here nothing of it does."""
    cluster = Cluster(compute=0.25, link=0.24, exchange=0.1)
    dense = cluster.run(5000)
    assert sum(dense) == 20
    assert not any(dense[100:])
    assert cluster.guard.measured["ddp"] == pytest.approx(0.49)


def test_a_trial_is_made_again_on_a_better_link() -> None:
    cluster = Cluster(compute=0.25, link=0.24, exchange=0.1)
    cluster.run(1000)
    cluster.link = 0.05
    assert cluster.run(3000)[-1]


def test_ddp_is_left_where_the_link_gets_slow() -> None:
    cluster = Cluster(compute=0.25, link=0.01, exchange=0.2)
    assert cluster.run(1000)[-1]
    cluster.link = 8.0
    assert not cluster.run(2000)[-1]
    # and is not found again by a window that still holds steps with DDP
    assert not any(cluster.run(3000))


def test_a_link_that_stays_as_it_is_changes_nothing() -> None:
    cluster = Cluster(compute=0.25, link=0.01, exchange=0.2)
    cluster.run(1000)
    wobble = itertools.cycle([0.008, 0.012, 0.01])
    cluster.guard._link = lambda: next(wobble)
    assert all(cluster.run(20_000))
    assert len(cluster.said) == 2


def test_a_refused_change_is_final() -> None:
    cluster = Cluster(compute=0.25, link=0.01, exchange=0.2)
    guard: Guard = cluster.guard
    for number in range(5000):
        busy = 0.2
        if guard.lap(0.45, busy):
            assert number == 49
            guard.refused("it cannot be")
    assert not guard.is_dense
    assert cluster.said[-1] == "goes on with the exchange, as it cannot be"


def test_a_refused_change_with_long_cycles() -> None:
    guard = Guard(32, lambda: 0.01, list, lambda text: None)
    for _ in range(3000):
        if guard.lap(0.45, 0.2):
            guard.refused("it cannot be")
    assert not guard.is_dense


def test_ranks_with_unlike_clocks_decide_alike() -> None:
    """Every rank decides on the mean of what all have measured."""
    inbox: list[list[float]] = []

    def first(numbers: list[float]) -> list[float]:
        inbox.append(list(numbers))
        return list(numbers)

    def make(agree: Callable[[list[float]], list[float]]) -> Guard:
        return Guard(1, lambda: 0.01, agree, lambda text: None)

    slow, fast = make(first), make(lambda numbers: inbox.pop(0))
    history = []
    for _ in range(200):
        changes = slow.lap(0.5, 0.2), fast.lap(0.1, 0.0)
        assert changes[0] == changes[1]
        history.append(slow.is_dense)
        assert slow.is_dense == fast.is_dense
    assert any(history)


def make_ladder(hides: bool = False, communicator: Communicator | None = None) -> tuple[Ladder, list[Rung]]:
    rungs, begin = make_rungs(WeightBlocks(), None)
    used: list[Rung] = []
    ladder = Ladder(
        rungs, begin, WeightBlocks(), communicator or CompressedAllReduce(), 25_000_000, 2, hides, used.append
    )
    return ladder, used


def test_a_ladder_takes_the_heaviest_rung_that_fits() -> None:
    """One bit a quarter of the time is 1/128 of a dense all-reduce's bytes, 8 bits always are 1/4 (and scales)."""
    ladder, used = make_ladder()
    assert not ladder.move(compute=1.0, busy=0.09, link=8.0)
    # 4 bits of all entries would take 0.11 s of the 0.08 s there are, 2 bits of half of them 0.03 s
    assert ladder.move(compute=1.0, busy=0.01, link=0.9)
    assert used[-1] == Rung(0.5, Quantized(2))
    assert ladder.move(compute=1.0, busy=0.03, link=0.3)
    assert used[-1] == Rung(1.0, Quantized(4))
    assert not ladder.move(compute=1.0, busy=0.06, link=0.3)


def test_a_ladder_goes_down_where_the_exchange_takes_too_long() -> None:
    ladder, used = make_ladder()
    assert not ladder.move(compute=1.0, busy=0.12, link=12.0), "a little too long is no reason"
    assert ladder.move(compute=1.0, busy=0.2, link=20.0)
    assert used[-1] == Rung(1 / 16, Quantized(1))
    assert not ladder.move(compute=1.0, busy=0.3, link=80.0), "there is no lighter one"


def test_an_exchange_beside_the_computation_may_take_as_long() -> None:
    ladder, used = make_ladder(hides=True)
    assert ladder.move(compute=1.0, busy=0.1, link=4.0)
    assert used[-1] == Rung(1.0, Quantized(4))


def test_rungs_follow_what_was_asked_for() -> None:
    rungs, begin = make_rungs(TopK(), Raw("bf16"))
    assert [rung.density for rung in rungs] == [0.001, 0.003, 0.01, 0.03, 0.1]
    assert {rung.codec for rung in rungs} == {Raw("bf16")}
    assert rungs[begin].density == 0.01
    rungs, begin = make_rungs(WeightBlocks(), Quantized(2))
    assert {rung.codec for rung in rungs} == {Quantized(2)}
    assert rungs[begin].density == 0.25


def test_a_guard_finds_the_rung_before_it_thinks_of_ddp() -> None:
    ladder, used = make_ladder()
    said: list[str] = []
    guard = Guard(1, lambda: 0.9, list, said.append, ladder)
    for _ in range(200):
        guard.lap(1.01, 0.01)
    assert used == [Rung(0.5, Quantized(2))]
    assert "density 0.5, Quantized(bits=2, group=256) from here on" in said[0]
    assert "goes on with the exchange" in said[1]
    assert len(said) == 2


def test_a_guard_that_must_not_leave_stays() -> None:
    guard = Guard(1, lambda: 0.001, list, lambda text: None, may_leave=False)
    assert not any(guard.lap(0.5, 0.4) for _ in range(3000))


@pytest.mark.parametrize("kind", ["none", "reentrant", "other"])
def test_reentrant_checkpointing_is_seen_in_the_graph(kind: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    out = layers(x) if kind == "none" else checkpoint(layers, x, use_reentrant=kind == "reentrant")
    assert is_reentrant(nn.Linear(4, 1)(out).sum()) == (kind == "reentrant")
