import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx90a", "gfx942"]
DENSE = ["accumulate_select", "difference_select", "select"]
ENTRIES = ["collect-x-int32", "collect-y-int32", "collect-x-y-int32", "collect-x-y-int64"]
ENTRIES += ["scatter_add-int32", "scatter_add-int64"]


@pytest.fixture(scope="module")
def needs(tmp_path_factory):
    """What every compiled kernel needs; compiled in a process that has no interpreter."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(root)}
    script = Path(__file__).with_name("compile_all.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("alignment", ["aligned", "unaligned"])
@pytest.mark.parametrize("op", DENSE)
def test_dense_pass(needs, op, alignment, target):
    found = needs[f"{op}-{alignment}-{target}"]
    assert found["spilled"] == 0
    if alignment == "aligned":
        # Two programs of 8 warps fit a multiprocessor, at 64 Ki registers.
        assert found["registers"] <= 128
        assert found["wide_loads"] > 0
        assert (found["wide_stores"] > 0) == (op == "accumulate_select")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ENTRIES)
def test_entry_kernels(needs, case, target):
    found = needs[f"{case}-{target}"]
    assert found["spilled"] == 0
    assert found["registers"] <= 128


def test_every_case_is_checked(needs):
    dense = {f"{op}-{alignment}" for op in DENSE for alignment in ("aligned", "unaligned")}
    assert set(needs) == {f"{case}-{target}" for case in dense | set(ENTRIES) for target in TARGETS}
