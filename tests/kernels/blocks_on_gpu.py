"""A script: runs the layers' kernels on the device it is given and fails unless the torch path agrees.

Products are summed in another order, and agree to rounding; what is pruned agrees bit for bit.
"""

import sys
from contextlib import nullcontext

import torch

from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.block_matmul import block_matmul, block_matmul_torch
from lightning_sparse.kernels.block_outer import block_outer, block_outer_torch
from lightning_sparse.kernels.nm_prune import nm_prune, nm_prune_torch
from lightning_sparse.kernels.path import interpret

# against sums in float64, relative to the largest magnitude
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SHAPES = [(256, 384, 1), (256, 384, 300), (1000, 72, 129), (33, 517, 64)]


def near(got, want):
    bound = TOLERANCE[got.dtype] * max(1.0, float(want.abs().max()))
    return bool((got.cpu().double() - want).abs().max() <= bound)


def check(device, out, inner, rows, block, dtype):
    generator = torch.Generator().manual_seed(out + rows)
    grid = -(-out // block), -(-inner // block)
    layout = BlockLayout.of(torch.rand(grid, generator=generator) < 0.5, out, inner, block)
    x, y = (torch.randn(rows, width, generator=generator).to(dtype) for width in (inner, out))
    blocks = torch.randn(layout.count, block, block, generator=generator).to(dtype)
    bias = torch.randn(out, generator=generator).to(dtype)
    there = [tensor.to(device) for tensor in (x, y, blocks, bias)]
    wide = [tensor.double() for tensor in (x, y, blocks, bias)]
    forward = block_matmul(there[0], there[2], layout, there[3])
    results = {
        "forward": near(forward, block_matmul_torch(wide[0], wide[2], layout, wide[3])),
        "repeated": torch.equal(forward, block_matmul(there[0], there[2], layout, there[3])),
        "transposed": near(
            block_matmul(there[1], there[2], layout, transposed=True),
            block_matmul_torch(wide[1], wide[2], layout, transposed=True),
        ),
        "outer": near(block_outer(there[0], there[1], layout), block_outer_torch(wide[0], wide[1], layout)),
    }
    pairs = zip(nm_prune(there[0], 2, 4), nm_prune_torch(x, 2, 4), strict=True)
    results["nm_prune"] = all(torch.equal(a.cpu(), b) for a, b in pairs)
    wrong = [op for op, right in results.items() if not right]
    if wrong:
        sys.exit(f"{', '.join(wrong)} differ at {out}x{inner}, {rows} rows, block {block}, {dtype}")


if __name__ == "__main__":
    place = torch.device(sys.argv[1])
    with interpret() if place.type == "cpu" else nullcontext():
        # The interpreter is checked elsewhere: here it only shows that the script itself works.
        for shape in SHAPES if place.type == "cuda" else [(40, 33, 20)]:
            for edge in (16, 32, 64, 128) if place.type == "cuda" else (16,):
                for kind in TOLERANCE:
                    check(place, *shape, edge, kind)
