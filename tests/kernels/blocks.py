"""Block-sparse cases for the block ops, and their dense twins, filled in one weight at a time."""

import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.kernels.block_layout import BlockLayout


class Case(NamedTuple):
    out_features: int
    in_features: int
    block: int
    rows: int
    density: float
    shuffled: bool = False


CASES = {
    "one-row": Case(64, 96, 32, 1, 0.5),
    "odd": Case(37, 75, 16, 33, 0.5),
    "odd-wide": Case(150, 131, 64, 19, 0.6),
    "one-weight": Case(1, 1, 16, 3, 1.0),
    "full": Case(64, 48, 16, 17, 1.0),
    "empty": Case(40, 33, 32, 5, 0.0),
    "shuffled": Case(80, 100, 16, 65, 0.4, True),
    "block-128": Case(128, 200, 128, 16, 1.0),
    "no-rows": Case(32, 32, 16, 0, 1.0),
}


def make_layout(case: Case) -> BlockLayout:
    generator = torch.Generator().manual_seed(case.in_features)
    grid = -(-case.out_features // case.block), -(-case.in_features // case.block)
    mask = torch.rand(grid, generator=generator) < case.density
    if 0 < case.density < 1:
        # an empty block row and an empty block column
        mask[0], mask[:, 0], mask[-1, -1] = False, False, True
    layout = BlockLayout.of(mask, case.out_features, case.in_features, case.block)
    if not case.shuffled:
        return layout
    order = torch.randperm(layout.count, generator=generator)
    return BlockLayout(layout.rows[order], layout.cols[order], case.out_features, case.in_features, case.block)


def make_blocks(layout: BlockLayout, dtype: torch.dtype) -> Tensor:
    """Random blocks; beyond the matrix they hold what must count for nothing."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(layout.count, layout.block, layout.block, generator=generator).to(dtype)
    for slot, (row, col) in enumerate(zip(layout.rows.tolist(), layout.cols.tolist(), strict=True)):
        blocks[slot, layout.in_features - col * layout.block :] = 100 if col * layout.block < layout.in_features else 0
        blocks[slot, :, layout.out_features - row * layout.block :] = 100
    return blocks


def dense_twin(blocks: Tensor, layout: BlockLayout) -> Tensor:
    """[out_features, in_features] float64: each weight looked up by itself."""
    places = dict(zip(zip(layout.rows.tolist(), layout.cols.tolist(), strict=True), blocks.tolist(), strict=True))
    b = layout.block
    return torch.tensor(
        [
            [
                places[o // b, i // b][i % b][o % b] if (o // b, i // b) in places else 0.0
                for i in range(layout.in_features)
            ]
            for o in range(layout.out_features)
        ],
        dtype=torch.float64,
    )


def normal(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def far_apart() -> Tensor:
    """[2, 1] float16 whose rows lie 2**31 entries apart, in memory of which only two pages are ever used."""
    memory = mmap.mmap(-1, 2**32 + 2)
    return torch.frombuffer(memory, dtype=torch.float16).as_strided((2, 1), (2**31, 1))


# relative to the largest magnitude: rounding of sums, and of the result; the interpreter truncates bf16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    bound = TOLERANCE[got.dtype] * max(1.0, float(want.abs().max()) if want.numel() else 1.0)
    assert got.double().sub(want).abs().le(bound).all()
