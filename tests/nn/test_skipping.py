"""`SkipLinear` and `SkipConv2d` against the dense layers, over patterns of zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.nn.crossover import forget, known, pinned
from lightning_sparse.nn.live import find_live
from lightning_sparse.nn.skip_conv2d import SkipConv2d
from lightning_sparse.nn.skip_linear import SkipLinear
from lightning_sparse.nn.work import Pass

M, N_IN, N_OUT, TILE = 70, 40, 48, 16  # samples, inputs, outputs


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def live_columns(x: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[1]) % 5 == 1).view(-1, *(1,) * (x.dim() - 2))


def live_rows(x: Tensor) -> Tensor:
    return x * (torch.arange(len(x)) % 7 == 2).view(-1, *(1,) * (x.dim() - 1))


def diagonal_tiles(x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[0])[:, None] // TILE, torch.arange(x.shape[1]) // TILE
    return x * (rows % (-(-x.shape[1] // TILE)) == columns)


def one_entry(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.view(-1)[7] = 2.0
    return out


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "relu": lambda x: x.relu(),
    "columns": live_columns,
    "rows": live_rows,
    "both": lambda x: live_rows(live_columns(x)),
    "tiles": diagonal_tiles,
    "zero": torch.zeros_like,
    "minus zero": lambda x: -torch.zeros_like(x),
    "one entry": one_entry,
}


def check(layer: nn.Module, dense: nn.Module, x: Tensor, grad: Callable[[Tensor], Tensor]) -> None:
    dense.load_state_dict(layer.state_dict())
    results = []
    for module in (layer, dense):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        upstream = grad(normal(*out.shape, seed=5))
        results.append([out, *torch.autograd.grad(out, [leaf, *module.parameters()], upstream)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("crossover", [0, 1])
@pytest.mark.parametrize("tile", [None, TILE])
@pytest.mark.parametrize("grad", PATTERNS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_linear_equals_the_dense_layer(pattern: str, grad: str, tile: int | None, crossover: int) -> None:
    layer, dense = SkipLinear(N_IN, N_OUT, tile=tile, dtype=torch.float64), nn.Linear(N_IN, N_OUT, dtype=torch.float64)
    with pinned(crossover):
        check(layer, dense, PATTERNS[pattern](normal(M, N_IN)), PATTERNS[grad])


@pytest.mark.parametrize("form", [{"padding": 1}, {"stride": 2, "padding": (0, 2), "bias": False}, {"dilation": 2}])
@pytest.mark.parametrize("grad", ["dense", "columns", "both", "zero"])
@pytest.mark.parametrize("pattern", ["dense", "relu", "columns", "rows", "both", "zero", "one entry"])
def test_convolution_equals_the_dense_layer(pattern: str, grad: str, form: dict[str, object]) -> None:
    layer = SkipConv2d(6, 5, (3, 2), dtype=torch.float64, **form)
    dense = nn.Conv2d(6, 5, (3, 2), dtype=torch.float64, **form)
    with pinned(1):
        check(layer, dense, PATTERNS[pattern](normal(9, 6, 8, 7)), PATTERNS[grad])


@pytest.mark.parametrize("form", [{"groups": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}])
def test_other_convolutions_are_the_dense_layer(form: dict[str, object]) -> None:
    layer, dense = (kind(6, 4, 3, dtype=torch.float64, **form) for kind in (SkipConv2d, nn.Conv2d))
    check(layer, dense, live_columns(normal(2, 6, 8, 7)), PATTERNS["dense"])
    assert layer.work.forward == Pass()


@pytest.mark.parametrize("pattern", ["both", "tiles"])
def test_gradcheck(pattern: str) -> None:
    linear = SkipLinear(20, 18, tile=16, dtype=torch.float64)
    conv = SkipConv2d(3, 2, 3, padding=1, dtype=torch.float64)
    with pinned(1):
        for layer, x in ((linear, PATTERNS[pattern](normal(20, 20))), (conv, live_columns(normal(3, 3, 4, 4)))):
            inputs = [x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in layer.parameters())]
            assert torch.autograd.gradcheck(lambda x, w, b, layer=layer: layer._skipping.apply(x, w, b), inputs)


def test_work_equals_the_closed_form_for_lines() -> None:
    layer = SkipLinear(N_IN, N_OUT, tile=None, dtype=torch.float64)
    x = live_rows(live_columns(normal(M, N_IN))).requires_grad_()
    with pinned(1):
        out = layer(x)
        out.backward(live_columns(normal(M, N_OUT)))
    # live: 10 of 70 rows and 8 of 40 columns of x, 10 of 48 columns of the gradient
    every = M * N_IN * N_OUT
    assert layer.work.forward == Pass(10 * 8 * N_OUT, every - 10 * 8 * N_OUT)
    assert layer.work.input_gradient == Pass(M * 10 * N_IN, every - M * 10 * N_IN)
    assert layer.work.weight_gradient == Pass(10 * 10 * 8, every - 10 * 10 * 8)


def test_work_equals_the_closed_form_for_tiles() -> None:
    layer = SkipLinear(N_IN, N_OUT, tile=TILE, dtype=torch.float64)
    with pinned(1):
        layer(diagonal_tiles(normal(M, N_IN)).requires_grad_()).backward(diagonal_tiles(normal(M, N_OUT)))
    # rows of tiles hold 16, 16, 16, 16 and 6 rows; columns of tiles 16, 16 and 8, and 16, 16 and 16
    live_x = 16 * 16 + 16 * 16 + 16 * 8 + 16 * 16 + 6 * 16
    live_grad = 16 * M
    assert layer.work.forward == Pass(live_x * N_OUT, (M * N_IN - live_x) * N_OUT)
    assert layer.work.input_gradient == Pass(live_grad * N_IN, (M * N_OUT - live_grad) * N_IN)
    fewer = min(live_x * N_OUT, live_grad * N_IN)
    assert layer.work.weight_gradient == Pass(fewer, M * N_IN * N_OUT - fewer)


def test_work_of_a_convolution() -> None:
    layer = SkipConv2d(10, 4, 3, padding=1, dtype=torch.float64)
    with pinned(1):
        layer(live_columns(normal(2, 10, 5, 6)).requires_grad_()).sum().backward()
    unit = 3 * 3 * 5 * 6
    assert layer.work.forward == layer.work.weight_gradient == Pass(2 * 2 * 4 * unit, 2 * 8 * 4 * unit)
    assert layer.work.input_gradient == Pass(2 * 10 * 4 * unit, 0)


@pytest.mark.parametrize("convolution", [False, True])
def test_behind_a_relu_no_gradient_is_made_for_dead_inputs(convolution: bool) -> None:
    if convolution:
        layers: list[nn.Module] = [SkipConv2d(6, 5, 3, relu_input=True), nn.Conv2d(6, 5, 3)]
        z = live_columns(normal(4, 6, 8, 8)).float() - 1e-9
    else:
        layers = [SkipLinear(N_IN, N_OUT, relu_input=True), nn.Linear(N_IN, N_OUT)]
        z = live_rows(live_columns(normal(M, N_IN))).float() - 1e-9
    layers[1].load_state_dict(layers[0].state_dict())
    grads = []
    for layer in layers:
        leaf = z.clone().requires_grad_()
        with pinned(1):
            layer(leaf.relu()).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    work = layers[0].work
    assert work.input_gradient.done == work.forward.done < work.forward.skipped


def test_zeros_times_infinity() -> None:
    layer, strict = SkipLinear(N_IN, N_OUT), SkipLinear(N_IN, N_OUT, strict_nonfinite=True)
    for each in (layer, strict):
        nn.init.constant_(each.weight, torch.inf)
    x = live_columns(normal(M, N_IN).abs() + 1).float()
    with pinned(1):
        assert bool((layer(x) == torch.inf).all())
        assert bool(strict(x).isnan().all())
        x[3, 0] = torch.nan
        # what is not finite in the operand that is looked at is never skipped
        assert bool(layer(x)[3].isnan().all())


def test_dense_operands_are_neither_measured_nor_read_to_the_end() -> None:
    forget()
    layer, x = SkipLinear(N_IN, N_OUT), normal(4000, N_IN).float()
    # far from every row of the sample
    x[77, 3] = 0
    assert (find_live(x).rows, find_live(x).columns) == (None, None)
    layer(x).square().sum().backward()
    assert known() == {}
    assert layer.work.forward == Pass(4000 * N_IN * N_OUT, 0)


def test_each_pass_measures_its_crossover_once() -> None:
    forget()
    layer = SkipLinear(N_IN, N_OUT, tile=None)
    for _ in range(2):
        layer(live_columns(normal(M, N_IN)).float()).sum().backward()
    # the gradient of the output is dense, and the input needs none
    assert sorted(case.layer for case in known()) == ["SkipLinear forward, lines", "SkipLinear weight gradient, lines"]


def test_find_live_agrees_with_a_count() -> None:
    for name, pattern in PATTERNS.items():
        x = pattern(normal(100, 37))
        live = find_live(x, TILE)
        rows, columns = (x != 0).any(1).nonzero().view(-1), (x != 0).any(0).nonzero().view(-1)
        assert (live.row_count, live.column_count) == (len(rows), len(columns)), name
        assert live.rows is None or torch.equal(live.rows, rows)
        assert live.columns is None or torch.equal(live.columns, columns)
        tiles = [
            (i, j) for i in range(7) for j in range(3) if bool(x[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].any())
        ]
        found = list(zip(live.tiles.rows.tolist(), live.tiles.cols.tolist(), strict=True)) if live.tiles else None
        assert found == (tiles if len(tiles) <= 0.9 * 21 else None), name


def test_more_dimensions_autocast_and_empty_batches() -> None:
    layer, conv = SkipLinear(N_IN, N_OUT), SkipConv2d(3, 2, 3)
    x = live_columns(normal(M, N_IN)).float().view(2, 35, N_IN)
    with pinned(1):
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert layer(x[0, 0]).shape == (N_OUT,)
        assert layer(x[:0]).shape == (0, 35, N_OUT)
        assert conv(torch.zeros(3, 5, 5)).shape == (2, 3, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x)
        out.sum().backward()
    assert (out.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_refuses_a_tile_that_no_kernel_has() -> None:
    with pytest.raises(ValueError, match=r"SkipLinear: block must be one of \(16, 32, 64, 128\), got 7"):
        SkipLinear(N_IN, N_OUT, tile=7)


def test_refuses_input_of_another_shape_or_dtype() -> None:
    layer, conv = SkipLinear(32, 48), SkipConv2d(3, 2, 3)
    for shape in ((32, 2), (2, 64), (2, 3, 16), ()):
        with pytest.raises(ValueError, match=r"SkipLinear: expected input \[\*, 32\], got"):
            layer(torch.zeros(shape))
    for shape in ((2, 5, 8, 8), (8, 8)):
        with pytest.raises(ValueError, match=r"SkipConv2d: expected input \[\*, 3, h, w\], got"):
            conv(torch.zeros(shape))
