"""`tile_matmul` on both of its paths against the dense product."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lightning_sparse.kernels.block_layout import BlockLayout
from lightning_sparse.kernels.path import interpret
from lightning_sparse.nn.tile_matmul import tile_matmul

MASKS = {
    "diagonal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "runs": [[1, 1, 0], [1, 0, 1], [1, 1, 1]],
    "empty row and column": [[0, 1, 1], [0, 0, 0], [0, 1, 0]],
    "none": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(48, 48), (41, 35)])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_tile_matmul(mask: str, kernel: bool, size: tuple[int, int], transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = BlockLayout.of(torch.tensor(MASKS[mask], dtype=torch.bool), *size, 16)
    live = layout.mask.repeat_interleave(16, 0).repeat_interleave(16, 1)[: size[0], : size[1]]
    a = torch.randn(size, generator=generator) * live
    # columns of a wider matrix, and a transposed one
    b = torch.randn(13, size[0] if transposed else size[1], generator=generator).t()
    with interpret() if kernel else contextlib.nullcontext():
        got = tile_matmul(a, layout, b, transposed)
    want = (a.t() if transposed else a).double() @ b.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
