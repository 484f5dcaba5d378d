"""The variants of the layers' kernels that `compile_all.py` compiles: block GEMMs and N:M pruning."""

import torch

from lightning_sparse.kernels import block_matmul, block_outer, nm_prune
from lightning_sparse.kernels.block_tiles import outer_tiles, tiles

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MATMUL = {
    "x_ptr": None,
    "blocks_ptr": None,
    "bias_ptr": None,
    "y_ptr": None,
    "starts_ptr": "*i32",
    "slots_ptr": "*i32",
    "others_ptr": "*i32",
    "rows": "i32",
    "inner": "i32",
    "outer": "i32",
    "x_stride": "i32",
}
OUTER = {
    "x_ptr": None,
    "y_ptr": None,
    "out_ptr": None,
    "rows_ptr": "*i32",
    "cols_ptr": "*i32",
    "rows": "i32",
    "inner": "i32",
    "outer": "i32",
    "x_stride": "i64",
    "y_stride": "i64",
}
PRUNE = {
    "weight_ptr": "*bf16",
    "pruned_ptr": "*bf16",
    "mask_ptr": "*i1",
    "rows": "i32",
    "columns": "i32",
    "groups": "i32",
}
MANY, FEW = 4096, 1
# op, block, dtype, rows, whole blocks, precision of float32
CASES = [
    ("forward", 16, torch.bfloat16, MANY, True, "ieee"),
    ("forward", 64, torch.bfloat16, MANY, True, "ieee"),
    ("transposed", 64, torch.bfloat16, MANY, True, "ieee"),
    ("outer", 64, torch.bfloat16, MANY, True, "ieee"),
    ("transposed", 128, torch.float16, MANY, True, "ieee"),
    ("outer", 128, torch.float16, MANY, True, "ieee"),
    ("forward", 64, torch.bfloat16, FEW, True, "ieee"),
    ("forward", 128, torch.bfloat16, MANY, False, "ieee"),
    ("outer", 64, torch.bfloat16, MANY, False, "ieee"),
    ("forward", 64, torch.float32, MANY, True, "ieee"),
    ("transposed", 128, torch.float32, MANY, False, "ieee"),
    ("outer", 128, torch.float32, MANY, True, "ieee"),
    ("forward", 64, torch.float32, MANY, True, "tf32"),
]


def cases(backend):
    """(name, kernel, signature, constants, options of the compiler) of each variant of a backend."""
    for op, block, dtype, rows, whole, precision in CASES:
        if precision == "tf32" and backend == "hip":
            continue
        name = f"block-{op}-{block}-{precision if precision == 'tf32' else NAMES[dtype]}"
        name += f"{'-few' if rows == FEW else ''}{'' if whole else '-cut'}"
        constants = {"WHOLE": whole, "PRECISION": precision, "WIDEN": False, "BLOCK": block}
        if op == "outer":
            size = outer_tiles(block, dtype, whole)
            kernel, signature = block_outer._block_outer_kernel, OUTER
            constants |= {"BLOCK_M": size.slice}
        else:
            size = tiles(block, dtype, rows, whole)
            kernel, signature = block_matmul._block_matmul_kernel, MATMUL
            constants |= {"BIAS": op == "forward", "TRANSPOSED": op == "transposed"}
            constants |= {"BLOCK_M": size.rows, "BLOCK_K": size.slice}
        signature = {key: kind or f"*{NAMES[dtype]}" for key, kind in signature.items()}
        yield (
            name,
            kernel,
            signature,
            constants,
            {
                "num_warps": size.warps,
                "num_stages": size.stages,
                "enable_fp_fusion": True,
            },
        )
    for n, m in ((2, 4), (4, 16)):
        constants = {"N": n, "M": m, "TILE": nm_prune.tile(m)}
        yield (
            f"nm_prune-{n}-{m}",
            nm_prune._nm_prune_kernel,
            PRUNE,
            constants,
            {"num_warps": 4, "enable_fp_fusion": False},
        )
