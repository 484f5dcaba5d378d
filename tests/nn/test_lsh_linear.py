"""`LSHLinear` on one rank: against the whole softmax, and against sums over the active rows written out."""

from __future__ import annotations

import io
import math
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_sparse.nn.active_softmax import Active, active_cross_entropy
from lightning_sparse.nn.crossover import pinned
from lightning_sparse.nn.lsh_linear import LSHLinear
from lightning_sparse.nn.lsh_tables import LSHTables
from lightning_sparse.nn.work import Pass, Work
from lightning_sparse.random import Draw
from lightning_sparse.schedules import piecewise

H, N, B = 8, 300, 6
SMALL = {"tables": 3, "bits": 4, "bucket": 8, "tail": 40}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(**options: object) -> LSHLinear:
    torch.manual_seed(0)
    layer = LSHLinear(H, N, dtype=torch.float64, **{**SMALL, **options})
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(3))
    return layer


def batch() -> tuple[Tensor, Tensor]:
    return normal(B, H, seed=1).requires_grad_(), torch.tensor([0, 299, 7, 7, 150, 42])


@pytest.mark.parametrize("case", ["evaluation", "dense path", "everything drawn"])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_all_rows_give_the_cross_entropy(case: str, sparse: bool, bias: bool) -> None:
    layer = make(sparse=sparse, bias=bias, tail=N * 40 if case == "everything drawn" else 0)
    x, target = batch()
    if case == "evaluation":
        layer.eval()
    with pinned(0 if case == "dense path" else 1):
        loss = layer.loss(x, target)
    got = torch.autograd.grad(loss, [x, *layer.parameters()])
    assert got[1].is_sparse == sparse
    want_loss = F.cross_entropy(F.linear(x, layer.weight, layer.bias), target)
    torch.testing.assert_close(loss, want_loss)
    for a, b in zip(got, torch.autograd.grad(want_loss, [x, *layer.parameters()]), strict=True):
        torch.testing.assert_close(a.to_dense(), b)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tail", [0, 40])
def test_the_estimate_is_the_sum_over_what_is_active(shared: bool, tail: int) -> None:
    layer, (x, target) = make(shared=shared, tail=tail), batch()
    bits = layer_bits(layer)
    with pinned(1):
        losses = layer.loss(x, target, reduction="none")
    found = layer.tables.query(x, layer.bucket, torch.tensor(bits[: layer.tables.tables])).tolist()
    drawn = {word % N for word in bits[layer.tables.tables :]}
    likely = [set(row) - {-1} | {int(t)} for row, t in zip(found, target, strict=True)]
    if shared:
        likely = [set().union(*likely)] * B
    logits = F.linear(x, layer.weight, layer.bias).detach()
    for b in range(B):
        others = drawn - likely[b]
        factor = (N - len(likely[b])) / max(1, len(others))
        total = sum(math.exp(logits[b, j]) for j in likely[b]) + factor * sum(math.exp(logits[b, j]) for j in others)
        assert math.isclose(losses[b].item(), math.log(total) - logits[b, target[b]].item(), rel_tol=1e-9)
    grad = torch.autograd.grad(losses.sum(), [layer.weight])[0].coalesce()
    assert set(grad.indices()[0].tolist()) == drawn.union(*likely)


def layer_bits(layer: LSHLinear) -> list[int]:
    return Draw(layer.seed, layer.step, "rank 0").bits(layer.tables.tables + layer.tail).tolist()


def test_the_normaliser_is_unbiased() -> None:
    layer, (x, target) = make(tail=30), batch()
    logits = F.linear(x, layer.weight, layer.bias).detach()
    aim = logits.gather(1, target[:, None]).squeeze(1)
    with pinned(1):
        totals = torch.stack([(layer.loss(x, target, "none") + aim).exp().detach() for _ in range(1000)])
    exact = logits.exp().sum(1)
    error = (totals.mean(0) - exact) / (totals.std(0) / math.sqrt(1000))
    assert error.abs().max() < 4.5, error


@pytest.mark.parametrize("subset", [True, False])
def test_gradcheck(subset: bool) -> None:
    rows = torch.tensor([0, 3, 4, 8]) if subset else None
    active = Active(rows, torch.tensor([1, 3, 1]), normal(3, 4 if subset else 9, seed=3))

    def losses(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return active_cross_entropy(x, x.detach(), weight, bias, active, None, Work(), False)

    inputs = [t.requires_grad_() for t in (normal(3, 4), normal(9, 4, seed=1), normal(9, seed=2))]
    assert torch.autograd.gradcheck(losses, inputs)


def test_only_active_rows_change() -> None:
    layer, (x, target) = make(), batch()
    optimizer, before = torch.optim.SparseAdam(layer.parameters(), lr=0.1), layer.weight.detach().clone()
    with pinned(1):
        layer.loss(x, target).backward()
    rows = layer.weight.grad.coalesce().indices()[0].tolist()
    assert set(target.tolist()) < set(rows) != set(range(N))
    optimizer.step()
    changed = (layer.weight != before).any(1).nonzero().view(-1).tolist()
    assert set(changed) <= set(rows)
    assert len(changed) > len(rows) / 2


def test_work_equals_the_closed_form() -> None:
    layer, (x, target) = make(), batch()
    with pinned(1):
        layer.loss(x, target).backward()
    active = layer.weight.grad.coalesce().indices().shape[1]
    hashing = (N + B) * H * 3 * 4
    done, skipped = B * active * H, B * (N - active) * H
    each = Pass(done, skipped)
    assert layer.work == Work(Pass(done + hashing, skipped - hashing), each, each)
    layer.eval().loss(x, target)
    assert layer.work.weight_gradient == each


def test_tables_are_rebuilt_on_schedule_and_equal_tables_made_from_scratch() -> None:
    layer, (x, target) = make(rebuild=piecewise({0: 2, 2: 3}), redraw=2), batch()
    with pinned(1):
        for step in range(8):
            before, old = layer.tables.order.clone(), layer.weight.detach().clone()
            with torch.no_grad():
                layer.weight += normal(N, H, seed=step)
                old += normal(N, H, seed=step)
            layer.loss(x, target)
            rebuilt = {0: 0, 2: 0, 5: 1}.get(step)
            if rebuilt is None:
                assert torch.equal(layer.tables.order, before)
            else:
                scratch = LSHTables(H, 3, 4, seed=0)
                scratch.build(old, layer.bias.detach(), generation=rebuilt)
                assert torch.equal(layer.tables.order, scratch.order)
                assert torch.equal(layer.tables.starts, scratch.starts)


def test_the_same_seed_gives_the_same_run_whatever_the_global_generator() -> None:
    runs = []
    for seed in (1, 2):
        layer, (x, target) = make(), batch()
        torch.manual_seed(seed)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        with pinned(1):
            for _ in range(4):
                optimizer.zero_grad()
                layer.loss(x, target).backward()
                optimizer.step()
        runs.append(layer.weight.detach())
    assert torch.equal(*runs)


def test_trains_to_a_lower_loss_than_it_began_with() -> None:
    layer, (x, target) = make(), batch()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    first = layer.eval().loss(x, target).item()
    layer.train()
    with pinned(1):
        for _ in range(30):
            optimizer.zero_grad()
            layer.loss(x, target).backward()
            optimizer.step()
    assert layer.eval().loss(x, target).item() < 0.5 * first
    # 7 is wanted of two different samples
    assert (layer.predict(x) == target).sum() >= 4


def test_state_dict_is_that_of_linear_and_tables_follow_it() -> None:
    layer, (x, target) = make(), batch()
    with pinned(1):
        layer.loss(x, target)
        assert list(layer.state_dict()) == ["weight", "bias"]
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = make(seed=0)
        nn.init.zeros_(other.weight)
        other.loss(x, target)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert other.step == 1
        torch.testing.assert_close(other.loss(x, target), layer.loss(x, target))


def test_a_resumed_run_is_the_run_itself() -> None:
    def train(layer: LSHLinear, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x, target = normal(B, H, seed=step), torch.arange(B) + step
            loss = layer.loss(x, target)
            layer.zero_grad()
            loss.backward()
            torch.optim.SGD(layer.parameters(), lr=0.5).step()
            losses.append(loss.item())
        return losses

    with pinned(1):
        first, second = (make(rebuild=3, redraw=2) for _ in range(2))
        # between two hashings, the functions drawn anew before and after
        train(first, range(8))
        file = io.BytesIO()
        torch.save(nn.Sequential(first).state_dict(), file)
        file.seek(0)
        nn.Sequential(second).load_state_dict(torch.load(file, weights_only=True))
        assert train(first, range(8, 20)) == train(second, range(8, 20))
        # tables of other rows are made anew
        third = LSHLinear(H, N + 1, dtype=torch.float64, **SMALL)
        assert not third.tables.load_state_dict(first.tables.state_dict(), N + 1, torch.device("cpu"))


def test_without_a_graph_the_loss_is_exact_and_no_step() -> None:
    layer, (x, target) = make(), batch()
    with pinned(1), torch.no_grad():
        loss = layer.loss(x, target)
    torch.testing.assert_close(loss, F.cross_entropy(layer(x), target))
    assert (layer.step, layer.work) == (0, Work())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_step(reentrant: bool) -> None:
    runs = []
    for run in (LSHLinear.loss, partial(checkpoint, LSHLinear.loss, use_reentrant=reentrant)):
        layer, (x, target) = make(), batch()
        with pinned(1):
            for _ in range(3):
                run(layer, x, target).backward()
        runs.append((layer.step, x.grad))
    assert runs[0][0] == runs[1][0] == 3
    assert torch.equal(runs[0][1], runs[1][1])


def test_sparse_gradients_are_refused_under_ddp() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for sparse in (True, False):
            layer = make(sparse=sparse)
            layer.forward = layer.loss  # DDP calls forward alone
            ddp = nn.parallel.DistributedDataParallel(layer)
            if sparse:
                with pytest.raises(
                    RuntimeError, match=r"expected dense gradients under DDP.*make it with sparse=False"
                ):
                    ddp(*batch())
                with ddp.no_sync():
                    ddp(*batch()).backward()
            else:
                ddp(*batch()).backward()
            assert layer.weight.grad.is_sparse == sparse
    finally:
        torch.distributed.destroy_process_group()


def test_shapes_with_more_dimensions() -> None:
    layer = make().eval()
    x, target = normal(2, 3, H), torch.arange(6).view(2, 3)
    losses = layer.loss(x, target, reduction="none")
    assert losses.shape == layer.predict(x).shape == (2, 3)
    torch.testing.assert_close(layer.loss(x, target), losses.mean())
    assert torch.equal(layer.predict(x), layer(x).argmax(-1))


def test_measures_whether_all_rows_are_faster() -> None:
    torch.manual_seed(0)
    layer = LSHLinear(H, 50, bucket=4, tail=2048)
    loss = layer.loss(normal(B, H).float(), torch.arange(B))
    # a tail of 2048 draws hits all of 50 rows: both ways give the exact loss
    torch.testing.assert_close(loss, F.cross_entropy(layer(normal(B, H).float()), torch.arange(B)))


def test_dense_steps_look_for_nothing_until_the_next_hashing() -> None:
    layer, (x, target) = make(rebuild=3), batch()
    hashed = []
    with pinned(0):
        for _ in range(7):
            layer.loss(x, target)
            hashed.append(layer.work.forward.done - sum(B * N * H for _ in range(layer.step)))
    # queries and tables at steps 0, 3 and 6
    each = (N + B) * H * 3 * 4
    assert hashed == [each, each, each, 2 * each, 2 * each, 2 * each, 3 * each]


def test_defaults_follow_the_number_of_classes() -> None:
    sizes = [(LSHLinear(2, classes).bucket, LSHLinear(2, classes).tail) for classes in (100, 60_000, 400_000)]
    assert sizes == [(8, 4), (10, 1875), (64, 2048)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket": 0}, "bucket must be at least 1, got 0"),
        ({"tail": -1}, "tail must be at least 0, got -1"),
        ({"rebuild": 0}, "rebuild must be at least 1 step, got 0 at step 0"),
        ({"bits": 30}, "bits must be in [1, 20], got 30"),
    ],
)
def test_refuses_options_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


def test_refuses_samples_that_do_not_fit() -> None:
    layer, (x, target) = make(), batch()
    with pytest.raises(ValueError, match=r"targets must be in \[0, 300\), got 0 to 300"):
        layer.loss(x, torch.tensor([0, 300, 7, 7, 150, 42]))
    with pytest.raises(ValueError, match=r"expected x \[\.\.\., 8\] and targets \[\.\.\.\], got \(6, 8\) and \(5,\)"):
        layer.loss(x, target[:5])
    with pytest.raises(ValueError, match=r"expected x \[\.\.\., 8\] and targets \[\.\.\.\], got \(\) and \(\)"):
        layer.loss(x.sum(), target[0])
    with pytest.raises(ValueError, match=r"targets must be .* got -100 to 299: leave out samples without a class"):
        layer.loss(x, torch.tensor([-100, 299, 7, 7, 150, 42]))
    with pytest.raises(TypeError, match=r"expected targets of torch\.int64, got torch\.float64"):
        layer.loss(x, target.double())
    assert layer.step == 0
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'none', got 'sum'"):
        layer.loss(x, target, reduction="sum")
