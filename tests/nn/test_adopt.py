"""`convert` with the layers that keep the parameters of those they replace."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from lightning_sparse.nn import LSHLinear, SkipConv2d, SkipLinear, SparseLSTM, convert
from lightning_sparse.nn.crossover import pinned


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, stride=2)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(12, 6, proj_size=3)
        self.hidden = nn.Linear(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(self.conv(x).relu())  # [b, 4, 2, 2]
        x, _ = self.lstm(x.flatten(2).transpose(1, 2))
        x, _ = self.projected(x)
        return self.hidden(x)


def test_converted_models_compute_the_same_and_keep_their_parameters() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want = model(x)
    want.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    swaps = {
        nn.Conv2d: SkipConv2d.from_conv2d,
        nn.LSTM: partial(SparseLSTM.from_lstm, threshold=1e-30),
        nn.Linear: SkipLinear.from_linear,
    }
    report = convert(model, swaps)
    assert report.swapped == ["conv", "lstm", "hidden"]
    reasons = {change.name: change.reason for change in report.changes if not change.swapped}
    assert reasons["projected"] == "proj_size must be 0, got 3"
    assert reasons["depthwise"].startswith("groups must be 1 and padding of zeros, by number, got Conv2d(4, 4")
    with pinned(1):
        got = model(x)
        got.square().sum().backward()
    torch.testing.assert_close(got, want)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=name)
    before = model.lstm.weight_hh_l0.detach().clone()
    # the optimizer holds the parameters that the new layers hold
    optimizer.step()
    assert not torch.equal(model.lstm.weight_hh_l0, before)
    assert model.lstm.step == 1


class Classifier(nn.Module):
    """An output layer as a layer of a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.output = LSHLinear(40, 3000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output.loss(x.relu(), torch.arange(len(x)))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "compile": lambda model: torch.compile(copy.deepcopy(model), backend="eager"),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["linear", "convolution", "lstm", "output"])
def test_copies_and_compiled_models_are_equal(kind: str, way: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(80, 40) * (torch.arange(40) % 5 == 0)
    model, inputs = {
        "linear": (nn.Sequential(SkipLinear(40, 30), nn.ReLU()), x),
        "convolution": (nn.Sequential(SkipConv2d(8, 4, 3), nn.ReLU()), x.view(10, 8, 8, 5)),
        "lstm": (SparseLSTM(40, 8), x.view(8, 10, 40)),
        "output": (Classifier(), x),
    }[kind]
    results = []
    with pinned(1):
        for each in (COPIES[way](model), model):
            out = each(inputs)
            out = out[0] if isinstance(out, tuple) else out
            grads = torch.autograd.grad(out.sum(), list(each.parameters()))
            results.append([out, *(grad.to_dense() for grad in grads)])
    torch.testing.assert_close(*results)


def test_an_output_layer_keeps_its_rows() -> None:
    linear = nn.Linear(4, 30).eval()
    layer = LSHLinear.from_linear(linear, tail=8)
    assert layer.weight is linear.weight
    assert not layer.training
    x, target = torch.randn(5, 4), torch.arange(5)
    torch.testing.assert_close(layer.loss(x, target), nn.functional.cross_entropy(linear(x), target))
    with pinned(1):
        layer.train().loss(x, target).backward()
    assert layer.weight.grad.is_sparse
