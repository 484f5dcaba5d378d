"""A script: runs every op on the device it is given and fails unless the torch path agrees, bit for bit.

Moments and norms are sums in another order, and agree to rounding, as does what is behind a root.
"""

import sys
from contextlib import nullcontext

import torch

from lightning_sparse.kernels.accumulate_select import accumulate_select, accumulate_select_torch
from lightning_sparse.kernels.adam import Adam
from lightning_sparse.kernels.difference_select import difference_select, difference_select_torch
from lightning_sparse.kernels.kth_largest import kth_largest, kth_largest_torch
from lightning_sparse.kernels.lamb_norms import lamb_norms, lamb_norms_torch
from lightning_sparse.kernels.lamb_step import lamb_step_, lamb_step_torch_
from lightning_sparse.kernels.lars_step import lars_step_, lars_step_torch_
from lightning_sparse.kernels.moments import moments, moments_torch
from lightning_sparse.kernels.momentum_select import momentum_select, momentum_select_torch
from lightning_sparse.kernels.norms import norms, norms_torch
from lightning_sparse.kernels.path import interpret
from lightning_sparse.kernels.scatter_add import scatter_add_, scatter_add_torch_
from lightning_sparse.kernels.select import select, select_torch
from lightning_sparse.kernels.take import take, take_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [[1], [4095], [4096], [4097], [4096, 0, 3, 4097, 1], [50_021, 7]]


def same(left, right):
    return all(torch.equal(a.cpu(), b) for a, b in zip(left, right, strict=True))


def near(left, right):
    # Both round in fp32 within a block only.
    pairs = zip(torch.stack(left[1:]).tolist(), torch.stack(right[1:]).tolist(), strict=True)
    return left.counted.item() == right.counted.item() and all(abs(a - b) <= 1e-5 * (1 + abs(b)) for a, b in pairs)


def close(left, right, rtol, atol=0.0):
    return all(torch.allclose(a.cpu().float(), b.float(), rtol, atol) for a, b in zip(left, right, strict=True))


def check_optimizers(device, sizes, dtype):
    """Norms are sums in another order, and roots of the CPU are off by a bit: LAMB agrees to rounding, LARS exactly."""
    generator = torch.Generator().manual_seed(1 + sum(sizes))

    def make(kind):
        here = [torch.randn(size, generator=generator).abs().to(kind) for size in sizes]
        return here, [piece.to(device, copy=True) for piece in here]

    (w, there_w), (g, there_g), (m, there_m), (v, there_v) = map(make, (dtype, dtype, torch.float32, torch.float32))
    trust, adam = torch.linspace(0.1, 2, len(sizes)), Adam(0.9, 0.99, 3.0, 5.0, 1e-6, 0.1)
    there_trust, rounding = trust.to(device), torch.finfo(dtype).eps
    results = {
        "norms": close([norms(there_w)], [norms_torch(w)], 1e-6),
        "lamb_norms": close(
            [lamb_norms(there_w, there_g, there_m, there_v, adam)], [lamb_norms_torch(w, g, m, v, adam)], 1e-6
        ),
    }
    lars_step_(there_w, there_g, there_m, there_trust, 0.3, 0.1, 0.9, True)
    lars_step_torch_(w, g, m, trust, 0.3, 0.1, 0.9, True)
    results["lars_step_"] = same(there_w, w) and same(there_m, m)
    lamb_step_(there_w, there_g, there_m, there_v, there_trust, adam)
    lamb_step_torch_(w, g, m, v, trust, adam)
    results["lamb_step_"] = close(there_w, w, rounding, 100 * rounding) and same(there_m, m) and same(there_v, v)
    return results


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
    taken = take(there_x, values.to(device), indices.to(device))
    results["take"] = same([taken], [take_torch(x, values, indices)])
    scatter_add_(there_x, values.to(device), indices.to(device), 1 / 3)
    scatter_add_torch_(x, values * (1 / 3), indices)
    results["scatter_add_"] = same(there_x, x)
    results |= check_optimizers(device, sizes, dtype)
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
