"""A script: compiles every kernel for every target, without a GPU, and prints as JSON what each needs."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_sparse.kernels import accumulate_select, compact, difference_select, scatter_add, select

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DENSE = {
    "pieces_ptr": "*i64",
    "piece_of_block_ptr": "*i32",
    "threshold_ptr": "*fp32",
    "start": "i64",
    "offsets_ptr": "*i16",
    "counts_ptr": "*i32",
    "before_ptr": "*i64",
}
COLLECT = {
    "pieces_ptr": "*i64",
    "piece_of_block_ptr": "*i32",
    "offsets_ptr": "*i16",
    "ends_ptr": "*i64",
    "first_ptr": "*i64",
    "blocks": "i32",
    "values_ptr": "*fp32",
    "indices_ptr": "*i32",
    "capacity": "i32",
}
SCATTER = {
    "bounds_ptr": "*i64",
    "targets_ptr": "*i64",
    "pieces": "i32",
    "products_ptr": "*fp32",
    "indices_ptr": "*i32",
    "entries": "i32",
}
WIDE = {"indices_ptr": "*i64", "capacity": "i64", "entries": "i64"}
# Every dtype of the pieces is a branch of one kernel, so a compilation covers them all.
DENSE_KERNELS = {
    "accumulate_select": accumulate_select._accumulate_select_kernel,
    "difference_select": difference_select._difference_select_kernel,
    "select": select._select_kernel,
}


def cases():
    """(name, kernel, signature, constants, warps) of each variant."""
    for name, kernel in DENSE_KERNELS.items():
        for aligned in (True, False):
            constants = {"ALIGNED": aligned, "BLOCK": compact.BLOCK}
            yield f"{name}-{'aligned' if aligned else 'unaligned'}", kernel, DENSE, constants, 8
    for wide in (False, True):
        suffix = "int64" if wide else "int32"
        for source in ("x-y",) if wide else ("x", "y", "x-y"):
            constants = {"SOURCE": source, "STEPS": 20, "BLOCK": compact.BLOCK, "OUTPUT_BLOCK": compact.OUTPUT_BLOCK}
            yield f"collect-{source}-{suffix}", compact._collect_kernel, widened(COLLECT, wide), constants, 4
        constants = {"STEPS": 9, "BLOCK": scatter_add.BLOCK}
        yield f"scatter_add-{suffix}", scatter_add._scatter_add_kernel, widened(SCATTER, wide), constants, 4


def widened(signature, wide):
    return {name: WIDE.get(name, kind) if wide else kind for name, kind in signature.items()}


def compile_for(target, kernel, signature, constants, warps):
    attributes = {
        (position,): [["tt.divisibility", 16]] for position, kind in enumerate(signature.values()) if kind[0] == "*"
    }
    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel.compiled, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})


def needs_on_nvidia(compiled):
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    assembly = compiled.asm["ptx"]
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.(?:b|u|s|f)32|ld\.global[.\w:]*\.v2\.b64", assembly)),
        "wide_stores": len(re.findall(r"st\.global[.\w:]*\.v4\.(?:b|u|s|f)32|st\.global[.\w:]*\.v2\.b64", assembly)),
    }


def needs_on_amd(compiled):
    assembly = compiled.asm["amdgcn"]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1]),
        "spilled": sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", assembly)),
        "wide_loads": len(re.findall(r"(?:global|buffer|flat)_load_dwordx4", assembly)),
        "wide_stores": len(re.findall(r"(?:global|buffer|flat)_store_dwordx4", assembly)),
    }


if __name__ == "__main__":
    result = {}
    for target_name, target in TARGETS.items():
        for name, *case in cases():
            compiled = compile_for(target, *case)
            needs = needs_on_nvidia(compiled) if target.backend == "cuda" else needs_on_amd(compiled)
            result[f"{name}-{target_name}"] = needs
    json.dump(result, sys.stdout)
