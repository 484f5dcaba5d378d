"""A script: runs every op on the device it is given and fails unless the torch path agrees, bit for bit.

Moments are sums in another order, and agree to rounding.
"""

import sys
from contextlib import nullcontext

import torch

from lightning_sparse.kernels.accumulate_select import accumulate_select, accumulate_select_torch
from lightning_sparse.kernels.difference_select import difference_select, difference_select_torch
from lightning_sparse.kernels.kth_largest import kth_largest, kth_largest_torch
from lightning_sparse.kernels.moments import moments, moments_torch
from lightning_sparse.kernels.momentum_select import momentum_select, momentum_select_torch
from lightning_sparse.kernels.path import interpret
from lightning_sparse.kernels.scatter_add import scatter_add_, scatter_add_torch_
from lightning_sparse.kernels.select import select, select_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [4095], [4096], [4097], [4096, 0, 3, 4097, 1], [50_021, 7]]


def same(left, right):
    return all(torch.equal(a.cpu(), b) for a, b in zip(left, right, strict=True))


def near(left, right):
    # Both round in fp32 within a block only.
    pairs = zip(torch.stack(left[1:]).tolist(), torch.stack(right[1:]).tolist(), strict=True)
    return left.counted.item() == right.counted.item() and all(abs(a - b) <= 1e-5 * (1 + abs(b)) for a, b in pairs)


def check(device, sizes, dtype, start):
    generator = torch.Generator().manual_seed(sum(sizes))
    x = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    y = [torch.randn(size, generator=generator) for size in sizes]
    there_x, there_y = ([piece.to(device, copy=True) for piece in pieces] for pieces in (x, y))
    options = torch.tensor(1.5), max(sum(sizes) // 9, 1), start
    there = options[0].to(device), *options[1:]
    results = {
        "select": same(select(there_x, *there), select_torch(x, *options)),
        "difference_select": same(difference_select(there_x, there_y, *there), difference_select_torch(x, y, *options)),
    }
    results["kth_largest"] = all(
        same([kth_largest(there_x, k)], [kth_largest_torch(x, k)]) for k in (1, sum(sizes) // 9 + 1, sum(sizes) + 1)
    )
    results["moments"] = near(moments(there_x), moments_torch(x))
    z = [piece.flip(0) for piece in y]
    there_z = [piece.to(device, copy=True) for piece in z]
    moved = momentum_select(there_x, there_z, there_y, 0.9, 0.7, *there)
    results["momentum_select"] = same(moved, momentum_select_torch(x, z, y, 0.9, 0.7, *options))
    results["velocity"] = same(there_z, z)
    values, indices, count = accumulate_select_torch(x, y, *options)
    results["accumulate_select"] = same(accumulate_select(there_x, there_y, *there), (values, indices, count))
    results["residual"] = same(there_y, y)
    scatter_add_(there_x, values.to(device), indices.to(device), 1 / 3)
    scatter_add_torch_(x, values * (1 / 3), indices)
    results["scatter_add_"] = same(there_x, x)
    wrong = [op for op, right in results.items() if not right]
    if wrong:
        sys.exit(f"{', '.join(wrong)} differ at sizes {sizes}, {dtype}, start {start}")


if __name__ == "__main__":
    place = torch.device(sys.argv[1])
    with interpret() if place.type == "cpu" else nullcontext():
        # The interpreter is checked elsewhere: here it only shows that the script itself works.
        for case in SIZES if place.type == "cuda" else SIZES[4:5]:
            for kind in DTYPES:
                for begin in (0, sum(case) * 4 // 5):
                    check(place, case, kind, begin)
