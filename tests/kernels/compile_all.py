"""A script: compiles every kernel for every target, without a GPU, and prints as JSON what each needs.

With `--markdown` it prints a table. Bytes are those of loads and stores of at least 16 bytes in the assembly: what a
thread issues for a whole block, times threads, over the block's entries. Pieces are read in a branch for each dtype,
of 4, 2 and 2 bytes an entry, of which a launch takes one: those of the other two are subtracted.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_sparse.kernels import (
    accumulate_select,
    compact,
    difference_select,
    kth_largest,
    lamb_norms,
    lamb_step,
    lars_step,
    moments,
    momentum_select,
    norms,
    scatter_add,
    select,
    take,
)

# beside this script
import block_cases  # isort: skip

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
TAKE = {
    "bounds_ptr": "*i64",
    "vectors_ptr": "*i64",
    "pieces": "i32",
    "values_ptr": "*fp32",
    "indices_ptr": "*i32",
    "out_ptr": "*fp32",
    "entries": "i32",
}
COUNT = {
    "pieces_ptr": "*i64",
    "piece_of_block_ptr": "*i32",
    "key_ptr": "*i32",
    "counts_ptr": "*i64",
    "blocks": "i32",
    "programs": "i32",
}
CHOOSE = {"counts_ptr": "*i64", "key_ptr": "*i32", "rank_ptr": "*i64"}
MOMENTS = {"pieces_ptr": "*i64", "piece_of_block_ptr": "*i32", "parts_ptr": "*fp32", "blocks": "i32"}
# what multiplies matrices: tensor cores of sm_80, sm_90 and sm_100, matrix cores of AMD
MATRIX = r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma"
PIECES = {"pieces_ptr": "*i64", "piece_of_block_ptr": "*i32"}
LARS = PIECES | {"gradients_ptr": "*i64", "trust_ptr": "*fp32"} | dict.fromkeys(("lr", "decay", "momentum"), "fp32")
ADAM = dict.fromkeys(("beta1", "share1", "beta2", "share2", "first_scale", "second_scale", "eps", "decay"), "fp32")
LAMB_NORMS = PIECES | {"others_ptr": "*i64", "parts_ptr": "*fp32", "blocks": "i32"} | ADAM
LAMB_STEP = PIECES | {"others_ptr": "*i64", "scale_ptr": "*fp32"} | ADAM
JOIN = {"parts_ptr": "*fp32", "first_ptr": "*i64", "out_ptr": "*fp32", "blocks": "i32", "pieces": "i32"}
AMD_VERBS = {"ld": "load", "st": "store"}
# Bytes of a load or store, by the end of its name.
AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16} | dict.fromkeys(("ushort", "sshort", "short"), 2)
AMD_BYTES |= dict.fromkeys(("ubyte", "sbyte", "byte"), 1)
WIDE = {"indices_ptr": "*i64", "capacity": "i64", "entries": "i64"}
# Every dtype of the pieces is a branch of one kernel, so a compilation covers them all.
DENSE_KERNELS = {
    "accumulate_select": (accumulate_select._accumulate_select_kernel, DENSE, {}),
    "difference_select": (difference_select._difference_select_kernel, DENSE, {}),
    "select": (select._select_kernel, DENSE, {}),
    "momentum_select": (
        momentum_select._momentum_select_kernel,
        DENSE | {"velocities_ptr": "*i64", "momentum": "fp32", "scale": "fp32"},
        {},
    ),
    "moments": (moments._moments_kernel, MOMENTS, {}),
    "norms": (norms._squares_kernel, PIECES | {"parts_ptr": "*fp32"}, {}),
    "lars_step": (lars_step._lars_step_kernel, LARS, {"NESTEROV": True}),
    "lamb_norms": (lamb_norms._lamb_norms_kernel, LAMB_NORMS, {}),
    "lamb_step": (lamb_step._lamb_step_kernel, LAMB_STEP, {}),
} | {
    f"count-{top}-{bottom}": (kth_largest._count_kernel, COUNT, {"TOP": top, "BOTTOM": bottom})
    for top, bottom in pairwise(kth_largest.CUTS)
}
# Bytes that an fp32 entry costs at least, read and written.
FLOORS = {
    "accumulate_select": (8, 4),
    "difference_select": (8, 0),
    "select": (4, 0),
    "momentum_select": (12, 8),
    "moments": (4, 0),
    "norms": (4, 0),
    "lars_step": (12, 8),
    "lamb_norms": (16, 0),
    "lamb_step": (16, 12),
} | {f"count-{top}-{bottom}": (4, 0) for top, bottom in pairwise(kth_largest.CUTS)}
OTHER_DTYPES = 4
# How many pieces of any dtype a kernel reads and writes, where that is not one and none.
ANY_DTYPE = {"lars_step": (2, 1), "lamb_norms": (2, 0), "lamb_step": (2, 1)}


def cases():
    """(name, kernel, signature, constants, warps) of each variant."""
    for name, (kernel, signature, constants) in DENSE_KERNELS.items():
        for aligned in (True, False):
            constants = constants | {"ALIGNED": aligned, "BLOCK": compact.BLOCK}
            yield f"{name}-{'aligned' if aligned else 'unaligned'}", kernel, signature, constants, 8
    for top, bottom in pairwise(kth_largest.CUTS):
        constants = {"TOP": top, "BOTTOM": bottom}
        yield f"choose-{top}-{bottom}", kth_largest._choose_kernel, CHOOSE, constants, 8
    yield "join", norms._join_kernel, JOIN, {"CHUNK": norms.CHUNK}, 4
    for wide in (False, True):
        suffix = "int64" if wide else "int32"
        for source in ("x-y",) if wide else ("x", "y", "x-y"):
            constants = {"SOURCE": source, "STEPS": 20, "BLOCK": compact.BLOCK, "OUTPUT_BLOCK": compact.OUTPUT_BLOCK}
            yield f"collect-{source}-{suffix}", compact._collect_kernel, widened(COLLECT, wide), constants, 4
        constants = {"STEPS": 9, "BLOCK": scatter_add.BLOCK}
        yield f"scatter_add-{suffix}", scatter_add._scatter_add_kernel, widened(SCATTER, wide), constants, 4
        yield f"take-{suffix}", take._take_kernel, widened(TAKE, wide), constants | {"BLOCK": take.BLOCK}, 4


def widened(signature, wide):
    return {name: WIDE.get(name, kind) if wide else kind for name, kind in signature.items()}


def all_cases(backend):
    """(name, kernel, signature, constants, options of the compiler) of each variant, GEMM kernels last."""
    for *case, warps in cases():
        yield *case, {"num_warps": warps, "enable_fp_fusion": False}
    yield from block_cases.cases(backend)


def compile_for(target, kernel, signature, constants, options):
    attributes = {
        (position,): [["tt.divisibility", 16]] for position, kind in enumerate(signature.values()) if kind[0] == "*"
    }
    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel.compiled, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def needs_on_nvidia(compiled):
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def needs_on_amd(compiled):
    assembly = compiled.asm["amdgcn"]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1]),
        "spilled": sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", assembly)),
    }


def widths(compiled, backend, verb):
    """Bytes of each access to global memory."""
    if backend == "cuda":
        vectors = re.findall(rf"{verb}\.global[.\w:]*?(?:\.v(\d))?\.[busf](\d+)\s", compiled.asm["ptx"])
        return [int(count or 1) * int(bits) // 8 for count, bits in vectors]
    kinds = re.findall(rf"(?:global|buffer|flat)_{AMD_VERBS[verb]}_(\w+)", compiled.asm["amdgcn"])
    return [AMD_BYTES[re.sub(r"_d16.*", "", kind)] for kind in kinds]


def needs(name, target, constants, options, compiled):
    found = needs_on_nvidia(compiled) if target.backend == "cuda" else needs_on_amd(compiled)
    found["shared"] = compiled.metadata.shared
    found["matrix"] = sorted(set(re.findall(MATRIX, compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"])))
    if "ALIGNED" in constants:
        pieces = ANY_DTYPE.get(name.removesuffix("-aligned").removesuffix("-unaligned"), (1, 0))
        for figure, verb, count in (("read", "ld", pieces[0]), ("written", "st", pieces[1])):
            each, threads = widths(compiled, target.backend, verb), options["num_warps"] * target.warp_size
            wide, narrow = (
                sum(width for width in each if (width >= 16) == is_wide) * threads / constants["BLOCK"]
                for is_wide in (True, False)
            )
            found[figure] = wide - count * OTHER_DTYPES
            # the last block of a piece is read and written entry by entry; what is left are tables and results
            found[f"narrow_{figure}"] = narrow - wide
    return found


def extravagant():
    """`accumulate_select` with one more pass over the residual, an entry at a time: what the budget must notice."""
    source = Path(accumulate_select.__file__).read_text()
    line = "    store_block(residual_address"
    extra = "    residual += load_block(residual_address + 4, 0, piece, False, BLOCK)\n"
    assert source.count(line) == 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "extravagant.py")
        file.write_text(source.replace(line, extra + line))
        spec = importlib.util.spec_from_file_location("extravagant", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        constants, options = {"ALIGNED": True, "BLOCK": compact.BLOCK}, {"num_warps": 8, "enable_fp_fusion": False}
        for name, target in TARGETS.items():
            compiled = compile_for(target, module._accumulate_select_kernel, DENSE, constants, options)
            yield {"kernel": "extravagant", "target": name} | needs("", target, constants, options, compiled)


def markdown(result):
    """The aligned dense passes, with their bytes beside the floor, then the other kernels."""
    columns = ["kernel", "target", "registers", "spilled", "shared"]
    for header in ([*columns, "read", "written", "floor_read", "floor_written"], columns):
        yield "| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|"
        for row in result:
            if ("floor_read" in row) == ("floor_read" in header):
                yield "| " + " | ".join(f"{row[name]:g}" if name in header[2:] else row[name] for name in header) + " |"
        yield ""


if __name__ == "__main__":
    result = []
    for target_name, target in TARGETS.items():
        for name, kernel, signature, constants, options in all_cases(target.backend):
            compiled = compile_for(target, kernel, signature, constants, options)
            result.append({"kernel": name, "target": target_name} | needs(name, target, constants, options, compiled))
            if constants.get("ALIGNED"):
                floors = FLOORS[name.removesuffix("-aligned")]
                result[-1] |= dict(zip(("floor_read", "floor_written"), floors, strict=True))
    result.extend(extravagant() if "--markdown" not in sys.argv else ())
    print("\n".join(markdown(result)) if "--markdown" in sys.argv else json.dumps(result))
