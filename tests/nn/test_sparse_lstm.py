"""`SparseLSTM` against `nn.LSTM`, and against a plain LSTM whose gate gradients are masked by hooks."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from lightning_sparse.nn.crossover import forget, known, pinned
from lightning_sparse.nn.gate_selection import GateSelection
from lightning_sparse.nn.lstm_scan import lstm_scan
from lightning_sparse.nn.sparse_lstm import SparseLSTM
from lightning_sparse.nn.work import Pass, Work
from lightning_sparse.schedules import cycle, piecewise

T, B, W, H = 7, 3, 5, 4  # time steps, batch, width of the input, hidden units
Mask = Callable[[int, Tensor], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hooked(lstm: nn.LSTM, x: Tensor, mask: Mask) -> Tensor:
    """An LSTM of one layer, written out; `mask` sees the gradient of each step's pre-activations."""
    w_ih, w_hh, b_ih, b_hh = lstm.all_weights[0]
    h = c = x.new_zeros(x.shape[1], lstm.hidden_size)
    outs = []
    for t, step in enumerate(x):
        gates = step @ w_ih.T + b_ih + h @ w_hh.T + b_hh
        gates.register_hook(lambda delta, t=t: mask(t, delta))
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outs.append(h)
    return torch.stack(outs)


def best(scores: list[float], density: float, threshold: float | None) -> list[int]:
    if threshold is not None:
        return [j for j, score in enumerate(scores) if score >= threshold]
    order = sorted(range(len(scores)), key=lambda j: -scores[j])
    return order[: math.ceil(density * len(scores))]


def expected_mask(density: float, threshold: float | None, granularity: str, chunk: int) -> Mask:
    """For gradients that all steps have of their own: called from the last step to the first."""
    made, live = math.inf, torch.zeros(4 * H)

    def mask(t: int, delta: Tensor) -> Tensor:
        nonlocal made, live
        if granularity == "element":
            live = torch.zeros(delta.numel())
            live[best(delta.abs().flatten().tolist(), density, threshold)] = 1
            return delta * live.view_as(delta)
        # a choice is made anew behind a whole chunk, or where nothing was kept
        if made - t >= chunk or not live.any():
            made, live = t, torch.zeros(4 * H)
            scores = delta.abs().sum(0)
            if granularity == "column":
                live[best(scores.tolist(), density, threshold)] = 1
            else:
                for unit in best([float(scores[j::H].sum()) for j in range(H)], density, threshold):
                    live[unit::H] = 1
        return delta * live

    return mask


def make(**options: object) -> SparseLSTM:
    torch.manual_seed(0)
    return SparseLSTM(W, H, dtype=torch.float64, **options)


def gradients(lstm: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((out * normal(*out.shape, seed=9)).sum(), [x, *lstm.parameters()]))


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("granularity", ["column", "unit", "element"])
@pytest.mark.parametrize(("density", "threshold"), [(0.5, None), (0.3, None), (0.01, None), (None, 0.4), (None, 1e9)])
def test_gradients_are_those_of_the_masked_cell(
    density: float | None, threshold: float | None, granularity: str, chunk: int
) -> None:
    lstm = make(density=density, threshold=threshold, granularity=granularity, chunk=chunk)
    x = normal(T, B, W).requires_grad_()
    with pinned(1):
        out, _ = lstm(x)
    reference = hooked(lstm, x, expected_mask(density or 0, threshold, granularity, chunk))
    torch.testing.assert_close(out, reference)
    for got, want in zip(gradients(lstm, out, x), gradients(lstm, reference, x), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_form_of_the_layer_equals_the_dense_one(bias: bool, bidirectional: bool, batch_first: bool) -> None:
    form = {"num_layers": 2, "bias": bias, "bidirectional": bidirectional, "batch_first": batch_first}
    # the largest threshold that drops nothing but zeros runs the sparse path over all columns
    lstm = make(**form, threshold=5e-324)
    dense = nn.LSTM(W, H, dtype=torch.float64, **form)
    dense.load_state_dict(lstm.state_dict())
    x = normal(T, B, W).requires_grad_()
    states = 4 if bidirectional else 2
    for hx in (
        None,
        (normal(states, T if batch_first else B, H, seed=1), normal(states, T if batch_first else B, H, seed=2)),
    ):
        out, last = lstm(x, hx)
        want, want_last = dense(x, hx)
        torch.testing.assert_close([out, *last], [want, *want_last])
        for got, expected in zip(gradients(lstm, out, x), gradients(dense, want, x), strict=True):
            torch.testing.assert_close(got, expected)
    assert lstm.work.input_gradient.done > 0


def test_unbatched_input_and_states() -> None:
    lstm, x = make(threshold=5e-324), normal(T, W)
    hx = (normal(1, H, seed=1), normal(1, H, seed=2))
    out, (h, c) = lstm(x, hx)
    want, (want_h, want_c) = nn.LSTM.forward(lstm.eval(), x, hx)
    torch.testing.assert_close([out, h, c], [want, want_h, want_c])


def test_gradcheck_of_the_scan() -> None:
    lstm = make()
    inputs = [normal(3, 2, W), normal(2, H, seed=1), normal(2, H, seed=2), *lstm.all_weights[0][:2], normal(4 * H)]
    inputs = [x.detach().requires_grad_() for x in inputs]
    for selection in (GateSelection(1.0, None, "column", 2), GateSelection(0.5, 0.0, "unit", 2)):
        assert torch.autograd.gradcheck(lambda *x, s=selection: lstm_scan(*x, s, Work()), inputs)


LENGTHS = torch.tensor([3, T, 5])
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of one step": lambda out, c: out[2].square().sum(),
    "of the last cell state": lambda out, c: c.square().sum(),
    "at the ends of samples": lambda out, c: out[LENGTHS - 1, torch.arange(B)].square().sum(),
    "with a gap": lambda out, c: (out[-1] * 1e-6 + out[1]).square().sum(),
}


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("granularity", ["column", "unit"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_some_steps_keeps_its_gradient(
    loss: Callable[[Tensor, Tensor], Tensor], granularity: str, chunk: int
) -> None:
    x = normal(T, B, W)
    dense = nn.LSTM(W, H, dtype=torch.float64)
    dense.load_state_dict(make().state_dict())
    # dropping nothing, dropping noise, and dropping half
    for options, least in (({"threshold": 5e-324}, 1 - 1e-12), ({"threshold": 1e-3}, 0.999), ({"density": 0.5}, 0.5)):
        lstm = make(granularity=granularity, chunk=chunk, **options)
        flat = []
        for layer in (lstm, dense):
            with pinned(1):
                out, (_, c) = layer(x)
            flat.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss(out, c), layer.parameters())]))
        assert nn.functional.cosine_similarity(*flat, dim=0) > least


def test_gradients_that_are_not_finite_are_never_dropped() -> None:
    for granularity in ("column", "unit", "element"):
        lstm = make(threshold=0.1, granularity=granularity)
        (lstm(normal(T, B, W))[0].sum() * math.nan).backward()
        assert lstm.weight_ih_l0.grad.isnan().any()


@pytest.mark.parametrize(("granularity", "kept"), [("column", 7), ("unit", 8)])
def test_work_equals_the_closed_form(granularity: str, kept: int) -> None:
    # 0.4 of 16 columns is 7, of 4 units is 2
    lstm = make(density=0.4, granularity=granularity, chunk=2)
    with pinned(1):
        lstm(normal(T, B, W).requires_grad_())[0].sum().backward()
    each = Pass(done=T * B * kept * (W + H), skipped=T * B * (4 * H - kept) * (W + H))
    assert lstm.work == Work(Pass(), each, each)
    lstm.work.reset()
    with pinned(1):
        # without the product for the input
        lstm(normal(T, B, W))[0].sum().backward()
    assert lstm.work.weight_gradient == each
    assert lstm.work.input_gradient == Pass(T * B * kept * H, T * B * (4 * H - kept) * H)


def test_rows_of_dropped_columns_get_no_gradient() -> None:
    lstm = make(density=0.25)
    with pinned(1):
        lstm(normal(1, B, W))[0].sum().backward()
    live = lstm.weight_ih_l0.grad.abs().sum(1) > 0
    assert int(live.sum()) == 4
    assert torch.equal(live, lstm.bias_ih_l0.grad != 0)


def test_state_dict_is_that_of_the_dense_layer_and_carries_the_step() -> None:
    lstm, dense = make(num_layers=2), nn.LSTM(W, H, num_layers=2)
    assert list(lstm.state_dict()) == list(dense.state_dict())
    with pinned(1):
        lstm(normal(T, B, W))
    dense.load_state_dict(lstm.state_dict())
    file = io.BytesIO()
    torch.save(nn.Sequential(lstm).state_dict(), file)
    file.seek(0)
    other = make(num_layers=2)
    nn.Sequential(other).load_state_dict(torch.load(file, weights_only=True))
    assert (lstm.step, other.step) == (1, 1)
    other.load_state_dict(dense.state_dict())
    assert other.step == 1


def test_a_schedule_mixes_sparse_and_dense_steps() -> None:
    lstm, x = make(density=piecewise({0: 0.5, 2: 1.0})), normal(T, B, W)
    with pinned(1):
        done = []
        for _ in range(4):
            lstm(x)[0].sum().backward()
            done.append(lstm.work.input_gradient.done)
        with torch.no_grad():
            lstm(x)
        lstm.eval()(x)
    assert 0 < done[0] < done[1] == done[2] == done[3]
    assert lstm.step == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_step(reentrant: bool) -> None:
    runs = []
    for run in (nn.Module.__call__, partial(checkpoint, use_reentrant=reentrant)):
        lstm, x = make(density=cycle(0.5, 1.0)), normal(T, B, W).requires_grad_()
        with pinned(1):
            for _ in range(3):
                run(lstm, x)[0].sum().backward()
        runs.append((lstm.step, x.grad, lstm.work))
    assert runs[0][0] == runs[1][0] == 3
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


def test_dense_where_it_is_faster_and_for_packed_sequences() -> None:
    lstm = make()
    with pinned(0):
        lstm(normal(T, B, W))[0].sum().backward()
    with pinned(1):
        packed, _ = lstm(pack_padded_sequence(normal(T, B, W), torch.tensor([7, 4, 2])))
        packed.data.sum().backward()
        lstm(normal(T, 0, W))
    assert lstm.work == Work()


def test_autocast_runs_in_its_dtype() -> None:
    lstm = SparseLSTM(W, H)
    with pinned(1), torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = lstm(normal(T, B, W).float())
    out.sum().backward()
    assert (out.dtype, lstm.weight_hh_l0.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), nn.LSTM.forward(lstm, normal(T, B, W).float())[0], rtol=0.03, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be in (0, 1], got 0.0"),
        ({"density": 0.5, "threshold": 0.1}, "expected a density or a threshold, got both"),
        ({"threshold": -1.0}, "threshold must be at least 0, got -1.0"),
        ({"granularity": "row"}, "granularity must be one of ('column', 'unit', 'element'), got 'row'"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"proj_size": 2}, "proj_size must be 0, got 2: use nn.LSTM"),
    ],
)
def test_refuses_what_does_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


def test_measures_the_crossover_of_a_shape_once() -> None:
    forget()
    lstm, x = SparseLSTM(8, 8), normal(4, 2, 8).float()
    before = torch.random.get_rng_state()
    for steps in (4, 3):
        lstm(x[:steps])[0].sum().backward()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [(case.layer, case.shape) for case in known()] == [("SparseLSTM", (4, 2, 8, 8, 4))]
