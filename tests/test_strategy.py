"""The strategy's edge: names, arguments, errors. No second process."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lp
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

import lightning_sparse as ls
import lightning_sparse.lightning as ls_lightning
from lightning_sparse.arguments import is_linear
from lightning_sparse.checkpoint import save
from lightning_sparse.defaults import Parts, choose_exchange, choose_parts

NAMES = [
    f"sparse_ddp{start}{unused}"
    for start in ("", "_spawn", "_fork", "_notebook")
    for unused in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
]
METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


@pytest.mark.parametrize("tree", [pl, lp], ids=["pytorch_lightning", "lightning.pytorch"])
@pytest.mark.parametrize("name", NAMES)
def test_names_are_registered_in_both_trees(tree: Any, name: str) -> None:
    strategy = tree.strategies.StrategyRegistry.get(name)
    assert isinstance(strategy, tree.strategies.DDPStrategy)
    assert strategy._start_method == METHODS[re.sub("_find.*", "", name.removeprefix("sparse_ddp"))]
    expected = None if "find" not in name else name.endswith("true")
    assert strategy._ddp_kwargs.get("find_unused_parameters") is expected


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("order", ["import lightning_sparse; import {0}", "import {0}; import lightning_sparse"])
@pytest.mark.parametrize("tree", ["pytorch_lightning", "lightning.pytorch"])
def test_registration_works_in_any_order_of_imports(order: str, tree: str) -> None:
    code = (
        order.format(tree) + f"; import sys; Trainer = sys.modules['{tree}'].Trainer; "
        "trainer = Trainer(strategy='Sparse_DDP', accelerator='cpu', devices=2, logger=False); "
        "print(type(trainer.strategy).__module__)"
    )
    assert run_python(code) == f"lightning_sparse.{tree.split('.')[0]}"


def test_import_is_light() -> None:
    heavy = "[m for m in ('torch', 'triton', 'pytorch_lightning', 'lightning', 'rich') if m in sys.modules]"
    assert run_python(f"import sys, lightning_sparse; print({heavy})") == "[]"


PUBLIC = [
    "AllGather",
    "CompressedAllReduce",
    "DensityMonitor",
    "Gradients",
    "MomentumResidual",
    "NoMemory",
    "Quantized",
    "Raw",
    "Residual",
    "SampledTopK",
    "SparseDDPStrategy",
    "SparseProgressBar",
    "TopK",
    "Updates",
    "VirtualRanks",
    "WeightBlocks",
    "__version__",
    "constant",
    "exponential_warmup",
    "piecewise",
]


def test_public_names() -> None:
    assert ls.__all__ == PUBLIC
    assert all(getattr(ls, name) is not None for name in ls.__all__)
    with pytest.raises(AttributeError, match="no attribute 'TopX'"):
        _ = ls.TopX


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"density": 0}, ValueError, r"density must be in \(0, 1\], 'auto' or a schedule, got 0"),
        ({"density": 1.5}, ValueError, r"density must be in \(0, 1\], 'auto' or a schedule, got 1.5"),
        ({"density": float("nan")}, ValueError, "density must be in"),
        ({"density": True}, ValueError, "density must be in"),
        ({"density": "1%"}, ValueError, "density must be in"),
        ({"compressor": "topk"}, TypeError, r"compressor must be an object such as TopK\(\), got 'topk'"),
        ({"compressor": ls.TopK}, TypeError, "compressor must be an object such as"),
        ({"codec": ls.TopK()}, TypeError, "codec must be an object such as"),
        ({"memory": 0.9}, TypeError, "memory must be an object such as"),
        ({"communicator": ls.Raw()}, TypeError, "communicator must be an object such as"),
        ({"exchange": "gossip"}, ValueError, "exchange must be 'auto', Gradients"),
        ({"exchange": ls.Updates}, ValueError, "exchange must be 'auto', Gradients"),
        ({"ddp_comm_hook": print}, ValueError, "expected no ddp_comm_hook"),
        ({"ddp_comm_wrapper": print}, ValueError, "expected no ddp_comm_wrapper"),
        ({"ddp_comm_state": PostLocalSGDState(None, None, 1)}, ValueError, "expected no post-local SGD"),
        ({"model_averaging_period": 4}, ValueError, "expected no post-local SGD"),
        ({"ddp_comm_state": object()}, ValueError, "expected no ddp_comm_state"),
        ({"desnity": 0.5}, TypeError, "got an unknown argument 'desnity': did you mean 'density'?"),
        ({"zzz": 1}, TypeError, "got an unknown argument 'zzz': expected one of"),
        ({"mixed_precision": object()}, ValueError, "expected no DDP mixed_precision"),
    ],
)
def test_bad_arguments_raise_before_any_process_starts(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ls.SparseDDPStrategy(**arguments)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ls.Updates(every=0), "every must be an integer of at least 1, got 0"),
        (lambda: ls.Updates(every=1.5), "every must be an integer of at least 1, got 1.5"),
        (lambda: ls.Updates(every=True), "every must be an integer of at least 1, got True"),
        (lambda: ls.Updates(anchor_step=0), "anchor_step must be positive, got 0"),
        (lambda: ls.Updates(anchor_step="2"), "anchor_step must be positive, got '2'"),
        (lambda: ls.Updates(anchor_step=float("inf")), "anchor_step must be positive, got inf"),
        (lambda: ls.Updates(overlap="no"), "overlap must be True or False, got 'no'"),
        (lambda: ls.Updates(nesterov=1), "nesterov must be True or False, got 1"),
        (lambda: ls.Updates(outer_momentum=1.0), r"outer_momentum must be in \[0, 1\), got 1.0"),
        (lambda: ls.Updates(decay=0), r"decay must be in \(0, 1\], got 0"),
        (lambda: ls.Gradients(dense_below=1.5), r"dense_below must be at least 0, got 1\.5"),
        (lambda: ls.Updates(dense_below=-1), "dense_below must be at least 0, got -1"),
        (lambda: ls.Gradients(dense_below=-1), "dense_below must be at least 0, got -1"),
        (lambda: ls.TopK(scope="tensor"), "scope must be one of"),
        (lambda: ls.SampledTopK(sample=0), r"sample must be in \(0, 1\], got 0"),
        (lambda: ls.Raw("fp8"), "values must be one of"),
        (lambda: ls.MomentumResidual(1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: ls.MomentumResidual(0.9, clip=0.0), "clip must be positive or None, got 0.0"),
        (lambda: ls.exponential_warmup(0.0, 10), r"final must be in \(0, 1\], got 0.0"),
        (lambda: ls.exponential_warmup(0.1, -1), "steps must be at least 0, got -1"),
        (lambda: ls.piecewise({5: 0.1}), "expected a value for step 0"),
    ],
)
def test_bad_options_raise(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(("tree", "other"), [(pl, ls_lightning), (lp, ls)], ids=["pytorch_lightning", "lightning"])
def test_strategy_of_the_other_tree_is_named_in_the_error(tree: Any, other: Any) -> None:
    with pytest.raises(ValueError, match=rf"for {re.escape(tree.__name__)}.Trainer use lightning_sparse"):
        tree.Trainer(strategy=other.SparseDDPStrategy(), accelerator="cpu", devices=2, logger=False)


class Frozen(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 2))


def quiet(**options: Any) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }


@pytest.fixture
def _group() -> Any:
    """Gives back what a Trainer leaves behind: LOCAL_RANK and the like would make a later script wait for its ranks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_module_without_trainable_parameters_raises() -> None:
    with pytest.raises(ValueError, match="expected a module with trainable parameters, got Frozen with none"):
        pl.Trainer(strategy="sparse_ddp", **quiet()).fit(Frozen())


@pytest.mark.usefixtures("_group")
def test_a_memory_has_no_place_with_updates() -> None:
    with pytest.raises(ValueError, match="expected no memory with Updates"):
        ls.SparseDDPStrategy(memory=ls.Residual(), exchange=ls.Updates())


def test_defaults_follow_from_what_is_given() -> None:
    own, memory = choose_exchange("auto", None), choose_exchange("auto", ls.Residual())
    assert (own, memory) == (ls.Updates(), ls.Gradients())
    blocks = Parts(0.25, ls.WeightBlocks(), ls.Quantized(1), ls.CompressedAllReduce())
    picked = Parts(0.01, ls.TopK(), ls.Raw(), ls.AllGather())
    assert choose_parts(own, None, None, None, None) == blocks
    assert choose_parts(memory, None, None, None, None) == picked
    assert choose_parts(own, None, ls.TopK(), None, None) == picked
    assert choose_parts(memory, 1.0, None, ls.Quantized(4), None) == Parts(
        1.0, ls.WeightBlocks(), ls.Quantized(4), ls.CompressedAllReduce()
    )
    # a density alone is a share of entries that each rank picks
    assert choose_parts(own, 0.03, None, None, None) == Parts(0.03, ls.TopK(), ls.Raw(), ls.AllGather())
    assert choose_parts(own, None, None, ls.Quantized(2), None) == Parts(
        0.25, ls.WeightBlocks(), ls.Quantized(2), ls.CompressedAllReduce()
    )
    # density 1 is a dense all-reduce
    assert choose_parts(own, 1.0, None, None, None).codec == ls.Raw()


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Quantized.* needs entries that are the same on every rank, got TopK"):
        ls.SparseDDPStrategy(compressor=ls.TopK(), codec=ls.Quantized())
    with pytest.raises(ValueError, match=r"CompressedAllReduce\(\) needs entries.*use compressor=WeightBlocks"):
        ls.SparseDDPStrategy(compressor=ls.SampledTopK(), communicator=ls.CompressedAllReduce())
    with pytest.raises(ValueError, match=r"expected no find_unused_parameters with Gradients and Quantized"):
        ls.SparseDDPStrategy(exchange=ls.Gradients(), codec=ls.Quantized(4), find_unused_parameters=True)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_the_exchange_cannot_carry_are_named(dtype: torch.dtype) -> None:
    module = Frozen()
    module.extra = nn.Parameter(torch.zeros(3, dtype=dtype))
    with pytest.raises(TypeError, match=f"got {dtype} in 'extra': convert it"):
        pl.Trainer(strategy="sparse_ddp", **quiet()).fit(module)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_one_rank_trains_as_without_us(optimizer: Any) -> None:
    results = []
    for strategy in ("ddp", "sparse_ddp"):
        torch.manual_seed(0)
        module = Frozen()
        module.net.requires_grad_(True)
        module.configure_optimizers = lambda module=module: optimizer(module.parameters(), lr=0.1)
        trainer = pl.Trainer(strategy=strategy, **quiet())
        trainer.fit(module)
        results.append(module.net.weight.detach().clone())
    assert torch.equal(*results)
    assert trainer.strategy.summary() == {}


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("exchange", [ls.Updates(), ls.Gradients()], ids=lambda x: x.name)
def test_one_rank_skips_what_is_not_finite_or_raises(exchange: Any) -> None:
    class Bad(Frozen):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch).sum() * (torch.nan if batch_idx == 2 else 1.0)

    module = Bad()
    module.net.requires_grad_(True)
    trainer = pl.Trainer(strategy=ls.SparseDDPStrategy(exchange=exchange), **quiet())
    trainer.fit(module)
    assert module.net.weight.isfinite().all()
    module = Bad()
    module.net.requires_grad_(True)
    with pytest.raises(FloatingPointError, match="expected finite gradients on every rank"):
        pl.Trainer(strategy=ls.SparseDDPStrategy(exchange=exchange, on_nonfinite="raise"), **quiet()).fit(module)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("exchange", [ls.Updates(), ls.Gradients()], ids=lambda x: x.name)
def test_a_skipped_step_is_clipped_without_error(exchange: Any, algorithm: str) -> None:
    class Bad(Frozen):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch).sum() * torch.nan

    module = Bad()
    module.net.requires_grad_(True)
    before = module.net.weight.detach().clone()
    strategy = ls.SparseDDPStrategy(exchange=exchange)
    pl.Trainer(strategy=strategy, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm, **quiet()).fit(module)
    assert torch.equal(module.net.weight, before)


def test_what_is_saved_stays_as_it_was() -> None:
    """Training goes on while a file is written."""
    anchor = torch.ones(3)
    tap = SimpleNamespace(name="updates", shared_state=lambda together: {"groups": [{"anchor": {"w": anchor}}]})
    state = save("none", tap, SimpleNamespace(cut={}, compressor=None, communicator=None), [], torch.device("cpu"))
    anchor.zero_()
    assert state["shared"]["groups"][0]["anchor"]["w"].tolist() == [1, 1, 1]


def test_only_sgd_is_linear() -> None:
    weights = [nn.Parameter(torch.zeros(2, 2))]
    assert is_linear(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    for optimizer in (torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Muon):
        assert not is_linear(optimizer(weights, lr=0.1))


def test_a_strategy_can_be_pickled_for_spawned_ranks() -> None:
    strategy = ls.SparseDDPStrategy(density=ls.exponential_warmup(0.01, 100), exchange=ls.Updates(every=2))
    assert pickle.loads(pickle.dumps(strategy))._plan.parts.density(0) == 0.25
