"""`convert` with the layers that keep the parameters of those they replace."""

from __future__ import annotations

from functools import partial

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
