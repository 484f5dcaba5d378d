from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_sparse.nn import NM, BlockSparseLinear, UnsuitableError, convert
from lightning_sparse.nn import crossover as crossovers
from lightning_sparse.nn.crossover import pinned

BLOCKS = partial(BlockSparseLinear.from_linear, block=16, density=1.0)


def test_swaps_and_report():
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Sequential(nn.Linear(48, 16, bias=False)))
    x = torch.ones(2, 32)
    before = model(x)
    report = convert(model, {nn.Linear: partial(BlockSparseLinear.from_linear, block=16, density=0.5)})
    assert report.swapped == ["0", "2.0"]
    assert isinstance(model[0], BlockSparseLinear)
    assert isinstance(model[2][0], BlockSparseLinear)
    lines = str(report).splitlines()
    assert lines[0] == "2 of 2 layers swapped"
    assert lines[1].startswith("0: Linear -> BlockSparseLinear(in_features=32, out_features=48, bias=True, block=16")
    assert lines[1].endswith("parameters 1,584 -> 816")
    assert not torch.equal(model(x), before)


def test_full_density_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).double().eval()
    x = torch.ones(2, 32, dtype=torch.float64)
    before = model(x)
    model[0].weight.requires_grad_(False)
    convert(model, {nn.Linear: BLOCKS})
    torch.testing.assert_close(model(x), before)
    assert not model[0].weight.requires_grad
    assert model[2].weight.requires_grad
    assert not model[0].training


def test_only():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    report = convert(model, {nn.Linear: NM.from_linear}, only=lambda name: name == "1")
    assert report.swapped == ["1"]
    assert [type(layer) for layer in model] == [nn.Linear, NM]
    with pytest.raises(ValueError, match="expected a layer of type Linear, got none in Sequential: check `only`"):
        convert(model, {nn.Linear: NM.from_linear}, only=lambda name: False)


def test_a_shared_layer_stays_shared():
    layer = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    assert convert(model, {nn.Linear: BLOCKS}).swapped == ["a", "b.0"]
    assert model["a"] is model["b"][0]
    # within a shared container too, and where one of its names is chosen
    inner = nn.Sequential(nn.Linear(16, 16))
    model = nn.ModuleDict({"a": inner, "b": inner, "c": nn.Linear(16, 16), "d": nn.Sequential(inner[0])})
    assert convert(model, {nn.Linear: BLOCKS}, only=lambda name: name == "b.0").swapped == ["a.0", "b.0", "d.0"]
    assert model["a"][0] is model["d"][0]


def test_hooks_of_parameters_are_not_lost():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = nn.Sequential(nn.Linear(16, 16))
        getattr(model[0].weight, register)(lambda _: None)
        assert reasons(model) == {"0": "its parameters have hooks, which would be lost"}
        # a layer that takes the parameters over keeps them
        assert reasons(model, NM.from_linear) == {"0": ""}


def test_messages_where_nothing_is_found():
    swaps = {nn.Linear: NM.from_linear}
    with pytest.raises(ValueError, match="got the layer itself: call its swap on it"):
        convert(nn.Linear(16, 16), swaps)
    model = nn.Sequential(nn.Linear(16, 16))
    convert(model, swaps)
    with pytest.raises(ValueError, match="got none in Sequential: subclasses are not swapped, and there are NM"):
        convert(model, swaps)


def reasons(model, swap=BLOCKS):
    return {change.name: change.reason for change in convert(model, {nn.Linear: swap}).changes}


def test_what_is_kept():
    tied = nn.ModuleDict({"table": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    tied["head"].weight = tied["table"].weight
    assert reasons(tied) == {"head": "it shares a parameter with another layer"}
    assert tied["head"].weight is tied["table"].weight
    hooked = nn.Sequential(nn.Linear(16, 16))
    hooked[0].register_forward_hook(lambda *_: None)
    assert reasons(hooked) == {"0": "it has hooks, which would be lost"}
    assert type(hooked[0]) is nn.Linear
    # torch gives a parametrized layer a type of its own, which no swap names
    normed = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    assert reasons(normed) == {"1": ""}

    def refuse(_):
        raise UnsuitableError("too small")

    assert reasons(nn.Sequential(nn.Linear(16, 16)), refuse) == {"0": "too small"}


def test_dense_stays_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(crossovers, "_known", {})
    swap = partial(BlockSparseLinear.from_linear, block=16, density=0.5, rows=8)
    with pinned(0.4):
        assert reasons(nn.Sequential(nn.Linear(64, 64)), swap) == {
            "0": "with 8 rows it is faster than blocks above density 0.4, got 0.5"
        }
    with pinned(0.6):
        assert reasons(nn.Sequential(nn.Linear(64, 64)), swap) == {"0": ""}
    reasons(nn.Sequential(nn.Linear(64, 64)), swap)
    case = next(iter(crossovers.known()))
    assert (case.layer, case.shape) == ("BlockSparseLinear for nn.Linear", (8, 64, 64, 16))


def test_optimizers_made_afterwards_train_the_new_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    convert(model, {nn.Linear: partial(BlockSparseLinear.from_linear, block=16, density=0.5)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(64, 32)
    y = x[:, 16:20].argmax(1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
@pytest.mark.parametrize("swap", [BLOCKS, partial(NM.from_linear, n=4)], ids=["blocks", "nm"])
def test_fused_inference_is_left(swap):
    """In evaluation torch's fused path would read the weights past the new layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(3, 5, 32)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    model.eval()
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
        assert convert(model, {nn.Linear: swap}).swapped == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
        called = []
        model.layers[0].linear1.register_forward_hook(lambda *_: called.append(1))
        after = model(x, src_key_padding_mask=padding)
    assert called
    live = ~padding
    torch.testing.assert_close(after[live], before[live], rtol=1e-4, atol=1e-5)
