import threading

import pytest
import torch

from lightning_sparse.nn import crossover as module
from lightning_sparse.nn.crossover import Case, Crossover, Switch, crossover, forget, known, pinned, rounded_up

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(module, "_known", {})


@pytest.fixture
def clock(monkeypatch):
    """Runs report the seconds they are said to take, and how often they were timed is counted."""
    timed = []

    def time_alternating(runs, repeats, device, budget):
        timed.append(list(runs))
        return {name: run() for name, run in runs.items()}

    monkeypatch.setattr(module, "time_alternating", time_alternating)
    return timed


def case(rows=8):
    return Case.of("Layer", torch.zeros(1), rows)


@pytest.mark.parametrize(
    ("fixed", "slope", "want"),
    [
        (0.1, 1.8, 0.5),
        (0.0, 4.0, 0.25),
        (0.0, 1.6, 0.625),
        (0.5, 4.0, 0.125),
        (0.0, 0.9, 1.0),
        (1.0, 0.1, 0.0),
        (0.0, 16.0, 0.0),
    ],
)
def test_crossing_of_two_lines(clock, fixed, slope, want):
    """Dense takes 1 second, sparse fixed + slope * density: they cross where (1 - fixed) / slope says."""
    found = crossover(case(), lambda: lambda: 1.0, lambda density: lambda: fixed + slope * density)
    assert found.density == pytest.approx(want)
    assert found.dense_seconds == 1.0
    assert found.sparse_seconds[0] == (1 / 16, pytest.approx(fixed + slope / 16))


def test_densities_beyond_the_crossover_are_not_measured(clock):
    made = []
    crossover(case(), lambda: lambda: 1.0, lambda density: made.append(density) or (lambda: 3 * density))
    assert made == [1 / 16, 1 / 4, 1 / 2]


def test_measured_once_for_each_case(clock):
    def ask(rows):
        return crossover(case(rows), lambda: lambda: 1.0, lambda density: lambda: 3 * density)

    first = ask(8)
    assert ask(8) is first
    assert len(clock) == 3
    ask(16)
    assert len(clock) == 6
    assert known() == {case(8): first, case(16): first}
    forget()
    assert known() == {}


def test_threads_and_dtype_are_part_of_the_case():
    assert Case.of("Layer", torch.zeros(1), 2).threads == torch.get_num_threads()
    assert Case.of("Layer", torch.zeros(1), 2) != Case.of("Layer", torch.zeros(1).double(), 2)


def test_pinned_measures_nothing():
    def fail(*_):
        raise AssertionError

    with pinned(0.25):
        assert crossover(case(), fail, fail).density == 0.25
        with pinned(1):
            assert crossover(case(), fail, fail).density == 1
        assert crossover(case(), fail, fail).density == 0.25
    with pytest.raises(AssertionError):
        crossover(case(), fail, fail)
    with pytest.raises(ValueError, match=r"density must be in \[0, 1\], got 1.5"), pinned(1.5):
        pass


def test_real_runs_are_timed():
    """A run that waits for four ticks of an event is slower than one that waits for none."""
    never = threading.Event()
    found = module.measure(CPU, lambda: never.wait(0.01), lambda density: lambda: never.wait(0.04 * density))
    assert 0.15 < found.density < 0.4


def test_measuring_leaves_autocast_and_the_generator_alone(clock):
    seen = []
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        crossover(case(), lambda: lambda: seen.append(torch.is_autocast_enabled("cpu")) or 1.0, lambda _: lambda: 2.0)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]
    assert torch.equal(before, torch.get_rng_state())


def test_switch_keeps_its_mind_within_the_band():
    switch, half = Switch(margin=0.2), Crossover(0.5)
    taken = [switch.takes_sparse(density, half) for density in (0.5, 0.6, 0.61, 0.5, 0.41, 0.4)]
    assert taken == [True, True, False, False, False, True]
    assert switch.takes_sparse(1.0, Crossover(1.0))
    assert not switch.takes_sparse(0.0, Crossover(0.0))
    with pytest.raises(ValueError, match=r"margin must be in \[0, 1\), got 1"):
        Switch(margin=1)


def test_rounded_up():
    assert [rounded_up(size) for size in (0, 1, 2, 3, 128, 129)] == [1, 1, 2, 4, 128, 256]
