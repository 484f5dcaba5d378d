import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_sparse.kernels.path import interpret
from lightning_sparse.nn import BlockSparseLinear
from lightning_sparse.nn.crossover import forget, known, pinned

# (out_features, in_features, block)
SHAPES = {"even": (48, 64, 16), "odd": (37, 75, 16), "one-weight": (1, 1, 16), "wide-block": (70, 33, 32)}
PATHS = {"sparse": 1.0, "dense": 0.0}


def make_mask(out_features, in_features, block, seed=0):
    """Half of the blocks, with an empty block row and an empty block column where there are several."""
    grid = -(-out_features // block), -(-in_features // block)
    mask = torch.rand(grid, generator=torch.Generator().manual_seed(seed)) < 0.6
    if min(grid) > 1:
        mask[0], mask[:, 1], mask[-1, 0] = False, False, True
    return mask


def element_mask(mask, out_features, in_features, block):
    """Each weight's block looked up by itself."""
    return torch.tensor([[bool(mask[o // block, i // block]) for i in range(in_features)] for o in range(out_features)])


def make_pair(shape, dtype=torch.float64, bias=True, seed=0, crossover=1.0):
    """A layer, and a dense one with the same weights, zero in dead blocks."""
    out_features, in_features, block = shape
    torch.manual_seed(seed)
    dense = nn.Linear(in_features, out_features, bias, dtype=dtype)
    mask = make_mask(*shape)
    layer = BlockSparseLinear.from_linear(copy.deepcopy(dense), block=block, mask=mask, crossover=crossover)
    with torch.no_grad():
        dense.weight.mul_(element_mask(mask, *shape))
    return layer, dense


def noise(*shape, dtype=torch.float64, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def blocks_of(matrix, layer):
    """The layer's blocks cut out of a dense matrix one at a time."""
    out = torch.zeros_like(layer.weight, dtype=matrix.dtype)
    b = layer.block
    for slot, (row, col) in enumerate(zip(layer.block_rows.tolist(), layer.block_cols.tolist(), strict=True)):
        piece = matrix[row * b : row * b + b, col * b : col * b + b].t()
        out[slot, : piece.shape[0], : piece.shape[1]] = piece
    return out


@pytest.mark.parametrize("crossover", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradcheck(shape, crossover):
    layer, _ = make_pair(shape, crossover=crossover)

    def run(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

    x = noise(3, shape[1]).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, layer.weight, layer.bias), fast_mode=True)


@pytest.mark.parametrize("crossover", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("rows", [0, 1, 65])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_masked_dense_layer(shape, rows, crossover):
    layer, dense = make_pair(shape, crossover=crossover)
    x, grad = noise(rows, shape[1]), noise(rows, shape[0], seed=2)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = layer(ours), dense(theirs)
    torch.testing.assert_close(got, want)
    got.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(layer.weight.grad, blocks_of(dense.weight.grad, layer))
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)
    torch.testing.assert_close(layer.dense_weight(), dense.weight)


@pytest.mark.parametrize("path", ["interpreter", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, path):
    layer, dense = make_pair((40, 50, 16), dtype)
    dense.double()
    x, grad = noise(33, 50, dtype=dtype).requires_grad_(), noise(33, 40, dtype=dtype, seed=2)
    wide = x.detach().double().requires_grad_()
    with interpret() if path == "interpreter" else nullcontext():
        got = layer(x)
        got.backward(grad)
    want = dense(wide)
    want.backward(grad.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    pairs = [(got, want), (x.grad, wide.grad), (layer.weight.grad, blocks_of(dense.weight.grad, layer))]
    for ours, theirs in [*pairs, (layer.bias.grad, dense.bias.grad)]:
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def test_full_density_is_nn_linear():
    torch.manual_seed(3)
    dense = nn.Linear(45, 30)
    torch.manual_seed(3)
    layer = BlockSparseLinear(45, 30, block=16, crossover=1.0)
    assert torch.equal(layer.dense_weight(), dense.weight)
    assert torch.equal(layer.bias, dense.bias)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (layer, dense)]
    for step in range(5):
        x = noise(8, 45, dtype=torch.float32, seed=step)
        for module, optimizer in zip((layer, dense), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(layer.dense_weight(), dense.weight)


def test_strided_and_expanded_gradients():
    layer, dense = make_pair(SHAPES["odd"])
    for upstream in (lambda y: y.sum(), lambda y: (y.transpose(0, 1) * noise(5, 2, 37).transpose(0, 1)).sum()):
        x = noise(5, 2, 75).transpose(0, 1)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        upstream(layer(ours.transpose(0, 1))).backward()
        upstream(dense(theirs.transpose(0, 1))).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(layer.weight.grad, blocks_of(dense.weight.grad, layer))


@pytest.mark.parametrize("bias", [True, False])
def test_empty_layer(bias):
    layer = BlockSparseLinear(20, 40, bias, block=16, mask=torch.zeros(3, 2, dtype=torch.bool), crossover=1.0)
    x = torch.ones(2, 20, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer.bias.expand(2, 40) if bias else torch.zeros(2, 40))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 20))
    assert layer.weight.grad.shape == (0, 16, 16)
    layer.set_block_mask_(torch.ones(3, 2, dtype=torch.bool))
    assert layer.density == 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_work_is_what_the_mask_says(shape):
    layer, _ = make_pair(shape)
    live = int(element_mask(layer.block_mask, *shape).sum())
    every = shape[0] * shape[1]
    for rows in (3, 4):
        layer(noise(rows, shape[1]).requires_grad_()).sum().backward()
    for done in (layer.work.forward, layer.work.input_gradient, layer.work.weight_gradient):
        assert (done.done, done.skipped) == (7 * live, 7 * (every - live))
    layer.work.reset()
    layer(noise(2, shape[1])).sum().backward()
    assert (layer.work.forward.done, layer.work.input_gradient.done, layer.work.weight_gradient.done) == (
        2 * live,
        0,
        2 * live,
    )
    layer.work.reset()
    layer.records_dead_gradient = True
    layer(noise(2, shape[1])).sum().backward()
    assert (layer.work.weight_gradient.done, layer.work.weight_gradient.skipped) == (2 * every, 0)


def test_the_crossover_chooses_the_path():
    layer = BlockSparseLinear(64, 64, block=16, density=0.5)
    for density, skipped in ((0.0, 0), (0.4, 0), (0.6, 2048), (1.0, 2048)):
        layer.work.reset()
        with pinned(density):
            layer(torch.ones(1, 64))
        assert layer.work.forward.skipped == skipped
    forget()
    layer(torch.ones(5, 64))
    assert [(case.layer, case.shape) for case in known()] == [("BlockSparseLinear", (8, 64, 64, 16))]
    layer(torch.ones(7, 64))
    assert len(known()) == 1
    with torch.inference_mode():
        layer(torch.ones(1, 64))
    with torch.no_grad():
        layer(torch.ones(2, 64))
    assert len(known()) == 3


@pytest.mark.parametrize("crossover", PATHS.values(), ids=PATHS)
def test_dead_gradient(crossover):
    shape = SHAPES["odd"]
    layer, dense = make_pair(shape, crossover=crossover)
    layer.records_dead_gradient = True
    for seed in (1, 2):
        x, grad = noise(4, shape[1], seed=seed), noise(4, shape[0], seed=seed + 7)
        layer(x).backward(grad)
        dense(x).backward(grad)
    scores = layer.gradient_scores()
    want = torch.zeros(3, 5)
    for row in range(3):
        for col in range(5):
            want[row, col] = dense.weight.grad[row * 16 : row * 16 + 16, col * 16 : col * 16 + 16].norm()
    torch.testing.assert_close(scores, want)
    layer.forget_dead_gradient()
    torch.testing.assert_close(layer.gradient_scores(), want * layer.block_mask)
    assert layer.dead_gradient is None


def test_scores_of_weights():
    layer = BlockSparseLinear(20, 32, False, block=16, mask=torch.tensor([[True, False], [False, True]]))
    with torch.no_grad():
        layer.weight[0] = -2.0
        layer.weight[1, 0, :2] = torch.tensor([3.0, -4.0])
        layer.weight[1, 1:] = 0.0
        layer.weight[1, 0, 2:] = 0.0
    assert layer.weight_scores().tolist() == [[32.0, 0.0], [0.0, 5.0]]
    assert layer.weight_scores(1).tolist() == [[512.0, 0.0], [0.0, 7.0]]
    assert layer.weight_scores(float("inf")).tolist() == [[2.0, 0.0], [0.0, 4.0]]
    with pytest.raises(RuntimeError, match="call backward first"):
        layer.gradient_scores()


@pytest.mark.parametrize("counts", ["same", "more", "fewer"])
def test_training_across_masks_equals_masked_dense_training(counts):
    """Adam on the layer, and on a dense one whose dead weights, and moved state, are zero: the same weights."""
    shape = SHAPES["odd"]
    layer, dense = make_pair(shape)
    optimizer, twin = (torch.optim.Adam(module.parameters(), lr=0.05) for module in (layer, dense))
    mask = layer.block_mask
    for step in range(9):
        if step % 3 == 0 and step:
            new = mask.clone()
            live, dead = mask.nonzero().tolist(), (~mask).nonzero().tolist()
            for row, col in live[: 0 if counts == "more" else 2]:
                new[row, col] = False
            for row, col in dead[: {"same": 2, "more": 2, "fewer": 1}[counts]]:
                new[row, col] = True
            grown, dropped = layer.set_block_mask_(new, optimizer)
            assert (grown, dropped) == (int((new & ~mask).sum()), int((mask & ~new).sum()))
            moved = element_mask(new ^ mask, *shape)
            state = twin.state[dense.weight]
            for values in (dense.weight.data, state["exp_avg"], state["exp_avg_sq"]):
                values[moved] = 0
            mask = new
            assert torch.equal(layer.block_mask, mask)
        x = noise(6, shape[1], seed=step)
        for module, stepper in ((layer, optimizer), (dense, twin)):
            stepper.zero_grad()
            (module(x) - 1).square().mean().backward()
            if module is dense:
                dense.weight.grad.mul_(element_mask(mask, *shape))
            stepper.step()
        torch.testing.assert_close(layer.dense_weight(), dense.weight)
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert optimizer.param_groups[0]["params"][0] is layer.weight


def test_any_sequence_of_masks():
    """What stays keeps its weights, what is new is zero, whatever comes after what."""
    layer, _ = make_pair(SHAPES["odd"])
    for seed in range(30):
        before, mask = layer.dense_weight().detach(), layer.block_mask
        generator = torch.Generator().manual_seed(seed)
        new = torch.rand(mask.shape, generator=generator) < torch.rand((), generator=generator)
        grown, dropped = layer.set_block_mask_(new)
        assert (grown, dropped) == (int((new & ~mask).sum()), int((mask & ~new).sum()))
        assert torch.equal(layer.dense_weight(), before * element_mask(new, *SHAPES["odd"]))
        assert torch.equal(layer.block_mask, new)
        # new blocks get weights too, other ones in each round
        twin = nn.Linear(75, 37, dtype=torch.float64)
        with torch.no_grad():
            twin.weight.copy_(noise(37, 75, seed=seed))
        layer.load_state_dict(twin.state_dict())


def test_kept_blocks_keep_their_slots():
    layer = BlockSparseLinear(64, 64, False, block=16, density=0.5)
    before = dict(
        zip(zip(layer.block_rows.tolist(), layer.block_cols.tolist(), strict=True), layer.weight, strict=True)
    )
    mask = layer.block_mask
    moved = (mask.nonzero()[2], (~mask).nonzero()[3])
    for row, col in moved:
        mask[row, col] = ~mask[row, col]
    assert layer.set_block_mask_(mask) == (1, 1)
    places = list(zip(layer.block_rows.tolist(), layer.block_cols.tolist(), strict=True))
    for slot, place in enumerate(places):
        if slot == 2:
            assert place == tuple(moved[1].tolist())
            assert not layer.weight[slot].any()
        else:
            assert torch.equal(layer.weight[slot], before[place])


def test_moved_gradients_are_zero():
    layer = BlockSparseLinear(32, 32, False, block=16, mask=torch.tensor([[True, False], [False, True]]))
    layer(torch.ones(1, 32)).sum().backward()
    layer.records_dead_gradient = True
    layer(torch.ones(1, 32)).sum().backward()
    layer.set_block_mask_(torch.tensor([[True, True], [False, False]]))
    assert layer.weight.grad[1].abs().sum() == 0
    assert layer.weight.grad[0].eq(2).all()
    assert layer.dead_gradient is None
    # with more blocks, and with fewer, those that stay keep theirs
    layer.set_block_mask_(torch.ones(2, 2, dtype=torch.bool))
    assert layer.weight.grad.mean((1, 2)).tolist() == [2, 0, 0, 0]
    layer.set_block_mask_(torch.tensor([[True, False], [False, False]]))
    assert layer.weight.grad.mean((1, 2)).tolist() == [2]


@pytest.mark.parametrize("crossover", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("mask", [[[True, False], [True, False]], [[True, True], [True, True]]])
def test_other_blocks_between_forward_and_backward_are_refused(mask, crossover):
    layer = BlockSparseLinear(32, 32, block=16, mask=torch.eye(2, dtype=torch.bool), crossover=crossover)
    y = layer(torch.ones(1, 32))
    layer.set_block_mask_(torch.tensor(mask))
    with pytest.raises(RuntimeError, match="expected in backward the blocks of its forward pass, got others"):
        y.sum().backward()
    assert layer.weight.grad is None


def test_the_same_blocks_between_forward_and_backward_are_no_others():
    layer = BlockSparseLinear(32, 32, block=16, mask=torch.eye(2, dtype=torch.bool), crossover=0)
    y = layer(torch.ones(1, 32))
    layer.load_state_dict(layer.state_dict())
    layer.set_block_mask_(layer.block_mask)
    y.sum().backward()
    assert layer.weight.grad.ne(0).all()


OPTIMIZERS = {
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=0.25), "step_size", 0.25),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.125), "sum", 0.125),
}


@pytest.mark.parametrize(("make", "name", "want"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("more", [False, True])
def test_state_of_new_blocks_begins_as_the_optimizer_begins_it(make, name, want, more):
    layer = BlockSparseLinear(32, 32, block=16, mask=torch.eye(2, dtype=torch.bool))
    optimizer = make(layer.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(1, 32)).square().sum().backward()
        optimizer.step()
    assert optimizer.state[layer.weight][name].ne(want).all()
    layer.set_block_mask_(torch.tensor([[True, True], [False, more]]), optimizer)
    fresh = layer.block_mask.nonzero().tolist().index([0, 1]) if not more else 2
    assert optimizer.state[layer.weight][name][fresh].eq(want).all()
    assert optimizer.state[layer.weight][name][0].ne(want).all()


def test_an_optimizer_with_one_state_for_all_is_refused():
    layer = BlockSparseLinear(32, 32, block=16, mask=torch.eye(2, dtype=torch.bool))
    with pytest.raises(TypeError, match="expected optimizers with state of each parameter, got LBFGS"):
        layer.set_block_mask_(torch.ones(2, 2, dtype=torch.bool), torch.optim.LBFGS(layer.parameters()))
    assert torch.equal(layer.block_mask, torch.eye(2, dtype=torch.bool))


def test_a_hook_after_accumulation_survives_another_number_of_blocks():
    layer = BlockSparseLinear(32, 32, block=16, density=0.5)
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(tuple(weight.grad.shape)))
    layer(torch.ones(1, 32)).sum().backward()
    layer.set_block_mask_(torch.ones(2, 2, dtype=torch.bool))
    layer(torch.ones(1, 32)).sum().backward()
    assert seen == [(2, 16, 16), (4, 16, 16)]


def test_state_dict():
    layer, _ = make_pair(SHAPES["odd"])
    mask = layer.block_mask
    mask[0, 2] = True
    layer.set_block_mask_(mask)
    other = BlockSparseLinear(75, 37, block=16, density=0.2, dtype=torch.float64, crossover=1.0)
    other.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))
    x = noise(3, 75)
    assert torch.equal(other.block_mask, mask)
    assert torch.equal(other(x), layer(x))


def test_state_dict_of_another_layer():
    layer, other = BlockSparseLinear(64, 64, block=16, density=0.5), BlockSparseLinear(32, 64, block=16, density=1.0)
    before = layer.block_mask
    other.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"weight: expected blocks within \[4, 2\], got others"):
        other.load_state_dict(layer.state_dict())
    twice = layer.state_dict()
    twice["block_rows"], twice["block_cols"] = twice["block_rows"] * 0, twice["block_cols"] * 0
    with pytest.raises(RuntimeError, match=r"weight: expected blocks within \[4, 4\], got others"):
        layer.load_state_dict(twice)
    assert torch.equal(layer.block_mask, before)


DAMAGES = {
    "no blocks": (lambda state: state.pop("weight"), "expected the blocks whose places are given, got none"),
    "fewer blocks": (
        lambda state: state.update(weight=state["weight"][:3]),
        r"expected \[4, 16, 16\], got \[3, 16, 16\]: another layer's",
    ),
    "fewer rows": (
        lambda state: state.update(block_rows=state["block_rows"][:3]),
        r"expected a row and a column of each block, got \[3\] and \[4\]",
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_state_dict_that_is_refused_changes_nothing(damage, message, strict):
    layer = BlockSparseLinear(32, 32, False, block=16, mask=torch.eye(2, dtype=torch.bool))
    state = BlockSparseLinear(32, 32, False, block=16).state_dict()
    damage(state)
    before = layer.dense_weight().clone()
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state, strict=strict)
    assert torch.equal(layer.dense_weight(), before)


def test_a_gradient_of_other_blocks_does_not_survive_loading():
    layer = BlockSparseLinear(32, 32, block=16, mask=torch.eye(2, dtype=torch.bool))
    layer(torch.ones(1, 32)).sum().backward()
    layer.load_state_dict(BlockSparseLinear(32, 32, block=16).state_dict())
    assert layer.weight.grad is None
    layer(torch.ones(1, 32)).sum().backward()
    assert layer.weight.grad.shape == (4, 16, 16)


def test_state_dict_of_nn_linear():
    _, dense = make_pair(SHAPES["odd"])
    layer = BlockSparseLinear(75, 37, block=16, mask=make_mask(*SHAPES["odd"]), dtype=torch.float64)
    layer.load_state_dict(dense.state_dict())
    assert torch.equal(layer.dense_weight(), dense.weight)
    assert torch.equal(layer.bias, dense.bias)


def test_copies():
    layer, dense = make_pair(SHAPES["odd"])
    x = noise(3, 75)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.float().double()):
        torch.testing.assert_close(twin(x), dense(x), rtol=1e-5, atol=1e-6)


def test_autocast():
    layer, _ = make_pair(SHAPES["even"], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(noise(3, 64, dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_compiled():
    layer, dense = make_pair(SHAPES["even"])
    model = torch.compile(nn.Sequential(layer, nn.ReLU()), backend="eager")
    x = noise(3, 64)
    torch.testing.assert_close(model(x), dense(x).relu())


def test_blocks_of_largest_norm_stay():
    dense = nn.Linear(32, 48)
    with torch.no_grad():
        dense.weight.fill_(0.1)
        dense.weight[16:32, 16:] = 1.0
        dense.weight[40, 3] = 9.0
    layer = BlockSparseLinear.from_linear(dense, block=16, density=1 / 3)
    assert layer.block_mask.tolist() == [[False, False], [False, True], [True, False]]


def test_random_masks_are_agreed_on():
    torch.manual_seed(1)
    first = BlockSparseLinear(160, 160, block=16, density=0.3).block_mask
    torch.manual_seed(2)
    assert torch.equal(BlockSparseLinear(160, 160, block=16, density=0.3).block_mask, first)
    assert int(first.sum()) == 30
    assert not torch.equal(BlockSparseLinear(160, 160, block=16, density=0.3, seed=1).block_mask, first)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block": 24}, ValueError, r"block must be one of \(16, 32, 64, 128\), got 24"),
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0.0: give a mask for none at all"),
        ({"density": 1.5}, ValueError, r"density must be in \(0, 1\], got 1.5"),
        ({"crossover": 2}, ValueError, r"crossover must be in \[0, 1\], got 2"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, ValueError, r"mask must be \[1, 2\], .*, got \[2, 2\]"),
        ({"mask": torch.ones(1, 2)}, TypeError, r"mask must be torch\.bool, got torch\.float32"),
        ({"in_features": 0}, ValueError, "features must be at least 1, got 0 and 40"),
    ],
)
def test_messages(options, error, message):
    with pytest.raises(error, match=message):
        BlockSparseLinear(**({"in_features": 100, "out_features": 40} | options))


def test_wrong_input():
    with pytest.raises(ValueError, match=r"expected input \[\*, 100\], got \[3, 99\]"):
        BlockSparseLinear(100, 40)(torch.ones(3, 99))
