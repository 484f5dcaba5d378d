import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx90a", "gfx942"]
COUNTS = ["count-31-20", "count-20-9", "count-9-0"]
DENSE = ["accumulate_select", "difference_select", "select", "momentum_select", "moments", *COUNTS]
OPTIMIZERS = ["lars_step", "lamb_norms", "lamb_step"]
DENSE += ["norms", *OPTIMIZERS]
ENTRIES = ["collect-x-int32", "collect-y-int32", "collect-x-y-int32", "collect-x-y-int64"]
ENTRIES += ["scatter_add-int32", "scatter_add-int64", "choose-31-20", "choose-20-9", "choose-9-0", "join"]
ENTRIES += ["take-int32", "take-int64", "nm_prune-2-4", "nm_prune-4-16"]
# block GEMMs of half types, which the tensor cores multiply
HALF_GEMMS = ["block-forward-16-bf16", "block-forward-64-bf16", "block-transposed-64-bf16", "block-outer-64-bf16"]
HALF_GEMMS += ["block-transposed-128-fp16", "block-outer-128-fp16", "block-forward-64-bf16-few"]
HALF_GEMMS += ["block-forward-128-bf16-cut", "block-outer-64-bf16-cut"]
FULL_GEMMS = ["block-forward-64-fp32", "block-transposed-128-fp32-cut", "block-outer-128-fp32"]
# NVIDIA only
ROUNDED_GEMMS = ["block-forward-64-tf32"]
# tiles of fewer rows than a warp group multiplies at once
SMALL_GEMMS = ["block-forward-64-bf16-few"]


@pytest.fixture(scope="module")
def needs(tmp_path_factory):
    """What every compiled kernel needs; compiled in a process that has no interpreter."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(root)}
    script = Path(__file__).with_name("compile_all.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {f"{row['kernel']}-{row['target']}": row for row in json.loads(run.stdout)}


def is_frugal(op, found):
    """Whether narrow accesses, but for those of a piece's last block, are fewer than a pass over fp32 entries takes."""
    # NVIDIA loads every column of the table in each thread, AMD once
    tables = 0.5 if found["target"].startswith("gfx") else 5.5 if op in OPTIMIZERS else 4
    return found["narrow_read"] <= tables and found["narrow_written"] <= 3.5


@pytest.mark.parametrize("target", TARGETS)
def test_one_more_pass_is_noticed(needs, target):
    found = needs[f"extravagant-{target}"]
    # as many wide accesses as the op itself has
    assert (found["read"], found["written"]) == (8, 4)
    assert not is_frugal("accumulate_select", found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("alignment", ["aligned", "unaligned"])
@pytest.mark.parametrize("op", DENSE)
def test_dense_pass(needs, op, alignment, target):
    found = needs[f"{op}-{alignment}-{target}"]
    assert found["spilled"] == 0
    if alignment == "aligned":
        # Two programs of 8 warps fit a multiprocessor of 64 Ki registers; of a histogram, one fits an AMD compute unit.
        assert found["registers"] <= (256 if op in COUNTS and target.startswith("gfx") else 128)
        # All bytes of a whole block move 16 or more at once, and each of them once: fewer would be narrow accesses.
        assert found["read"] == found["floor_read"]
        assert found["written"] == found["floor_written"]
        assert is_frugal(op, found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ENTRIES)
def test_entry_kernels(needs, case, target):
    found = needs[f"{case}-{target}"]
    assert found["spilled"] == 0
    assert found["registers"] <= 128


@pytest.mark.parametrize(
    ("case", "target"),
    [*product(HALF_GEMMS + FULL_GEMMS, TARGETS), *product(ROUNDED_GEMMS, TARGETS[:3])],
)
def test_gemm_kernels(needs, case, target):
    found = needs[f"{case}-{target}"]
    assert found["spilled"] == 0
    # what a program may have: of AMD's compute units, and of the others
    assert found["shared"] <= (64 if target.startswith("gfx") else 99) * 1024


@pytest.mark.parametrize("case", HALF_GEMMS + ROUNDED_GEMMS)
def test_gemm_kernels_use_tensor_cores(needs, case):
    assert needs[f"{case}-sm_80"]["matrix"] == ["mma.sync"]
    assert needs[f"{case}-sm_90"]["matrix"] == (["mma.sync"] if case in SMALL_GEMMS else ["wgmma.mma_async"])


@pytest.mark.parametrize("case", HALF_GEMMS)
def test_gemm_kernels_use_matrix_cores(needs, case):
    assert needs[f"{case}-gfx90a"]["matrix"] == needs[f"{case}-gfx942"]["matrix"] == ["v_mfma"]


@pytest.mark.parametrize("case", FULL_GEMMS)
def test_full_precision_is_not_left_to_tensor_cores(needs, case):
    assert needs[f"{case}-sm_80"]["matrix"] == needs[f"{case}-sm_90"]["matrix"] == []


def test_every_case_is_checked(needs):
    dense = {f"{op}-{alignment}" for op in DENSE for alignment in ("aligned", "unaligned")}
    everywhere = {"extravagant"} | dense | set(ENTRIES + HALF_GEMMS + FULL_GEMMS)
    expected = {*product(everywhere, TARGETS), *product(ROUNDED_GEMMS, TARGETS[:3])}
    assert set(needs) == {f"{case}-{target}" for case, target in expected}
