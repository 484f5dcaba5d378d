"""What `bench layers` times of the layers that skip, at small sizes: it runs, is right, and notices what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_sparse.bench import layers, lsh_cases, lstm_cases, skip_cases
from lightning_sparse.bench.layer_cases import Contest
from lightning_sparse.nn import SkipConv2d, SkipLinear

CPU = torch.device("cpu")


def skip_linear() -> Contest:
    return skip_cases._contest(SkipLinear(20, 30), nn.Linear(20, 30), lambda x: skip_cases._every_tenth(x, 1), (40, 20))


def skip_conv() -> Contest:
    layer, dense = SkipConv2d(11, 5, 3), nn.Conv2d(11, 5, 3)
    return skip_cases._contest(layer, dense, lambda x: x.relu(), (2, 11, 6, 6))


CONTESTS: dict[str, Callable[[], Contest]] = {
    "lstm": lambda: lstm_cases._steps(3, 5, 6, 8, 0.5, CPU),
    "lstm backward": lambda: lstm_cases._backward(3, 40, 6, 16, CPU),
    "lsh": lambda: lsh_cases._steps(3000, False, CPU),
    "lsh with Adam": lambda: lsh_cases._steps(3000, True, CPU),
    "linear": skip_linear,
    "convolution": skip_conv,
}


@pytest.mark.parametrize("name", CONTESTS)
def test_contests_run_and_are_right(name: str) -> None:
    torch.manual_seed(0)
    contest = CONTESTS[name]()
    contest.sparse()
    contest.dense()
    assert contest.check()
    assert contest.crossover is None or 0 <= contest.crossover() <= 1


def test_checks_notice_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SkipLinear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 0.1

    spoiled = skip_cases._contest(Broken(20, 30), nn.Linear(20, 30), lambda x: x, (40, 20))
    spoiled.sparse()
    assert not spoiled.check()
    loss = lsh_cases.LSHLinear.loss
    monkeypatch.setattr(lsh_cases.LSHLinear, "loss", lambda *arguments: 1.05 * loss(*arguments))
    contest = lsh_cases._steps(3000, False, CPU)
    contest.sparse()
    assert not contest.check()


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_layer_has_cases(device: str, quick: bool) -> None:
    found = [case for cases in layers.CASES for case in cases(torch.device(device), quick)]
    names = {"BlockSparseLinear", "NM", "SparseLSTM", "LSHLinear", "SkipLinear"}
    assert {case.layer for case in found} == names | (set() if quick else {"SkipConv2d"})
    assert len({(case.layer, case.case) for case in found}) == len(found)
