"""`LSHTables` against tables made one row at a time, and what theory says of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_sparse.nn.lsh_tables import LSHTables


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def no_shift(tables: LSHTables) -> Tensor:
    return torch.zeros(tables.tables, dtype=torch.int64)


@pytest.mark.parametrize("bits", [3, 16])
def test_tables_hold_each_row_under_its_code(bits: int) -> None:
    tables, rows, offsets = LSHTables(8, tables=3, bits=bits, seed=5), normal(70, 8), normal(70, seed=1)
    tables.build(rows, offsets, generation=2)
    centred = torch.cat([rows - rows.mean(0), (offsets - offsets.mean())[:, None]], 1)
    signs = (centred @ tables._planes > 0).view(70, 3, bits)
    for table in range(3):
        codes = [sum(int(bit) << k for k, bit in enumerate(row)) for row in signs[:, table].tolist()]
        order = sorted(range(70), key=lambda row: codes[row])
        assert tables.order[table].tolist() == order
        for code in set(codes):
            first, last = tables.starts[table, code : code + 2].tolist()
            assert order[first:last] == [row for row in range(70) if codes[row] == code]


def test_a_query_finds_whole_buckets_and_parts_of_large_ones() -> None:
    tables, rows, queries = LSHTables(8, tables=2, bits=2, seed=0), normal(60, 8), normal(5, 8, seed=1)
    tables.build(rows, None)
    codes = tables.codes(queries).tolist()
    everything = tables.query(queries, bucket=60, shift=torch.tensor([7, 100])).view(5, 2, 60)
    some = tables.query(queries, bucket=4, shift=torch.tensor([3, 0])).view(5, 2, 4)
    for query in range(5):
        for table in range(2):
            first, last = tables.starts[table, codes[query][table] :][:2].tolist()
            bucket = tables.order[table, first:last].tolist()
            assert [row for row in everything[query, table].tolist() if row >= 0] == bucket
            found = [row for row in some[query, table].tolist() if row >= 0]
            begin = (3 if table == 0 else 0) if len(bucket) > 4 else 0
            assert found == (bucket[begin:] + bucket)[: min(4, len(bucket))]


def test_a_bit_agrees_as_often_as_the_angle_says() -> None:
    tables = LSHTables(2, tables=400, bits=10, seed=1)
    shares = []
    for angle in (0.1, 0.7, 1.5, 3.0):
        # two rows far from a common centre, so that centring leaves their angle: rows and their opposites
        a, b = torch.tensor([1.0, 0.0]), torch.tensor([math.cos(angle), math.sin(angle)])
        tables.build(torch.stack([a, b, -a, -b]), None)
        signs = torch.stack([a, b]) @ tables._planes[:-1] > 0
        share = float((signs[0] == signs[1]).float().mean())
        assert abs(share - (1 - angle / math.pi)) < 0.03
        shares.append(float((tables.query(a[None], 4, no_shift(tables)).view(-1, 4) == 1).any(1).float().mean()))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6 > 0.01 > shares[-1]


def test_finds_the_largest_product_more_often_than_chance() -> None:
    tables, rows = LSHTables(16, tables=8, bits=5, seed=0), normal(4000, 16)
    queries = normal(200, 16, seed=1)
    tables.build(rows, None)
    found = tables.query(queries, bucket=128, shift=no_shift(tables))
    best = (queries @ rows.T).argmax(1, keepdim=True)
    recall = float((found == best).any(1).float().mean())
    chance = sum(len(set(row) - {-1}) for row in found.tolist()) / 200 / 4000
    assert recall > 2 * chance, (recall, chance)


def test_offsets_count_as_one_more_coordinate() -> None:
    tables, rows, queries = LSHTables(4, tables=200, bits=6, seed=0), normal(50, 4), normal(20, 4, seed=1)
    offsets = torch.zeros(50).index_fill_(0, torch.tensor([9]), 100.0)
    tables.build(rows, offsets)
    # the row with a large offset has the largest product with every query
    hits = (tables.query(queries, 50, no_shift(tables)).view(-1, 50) == 9).any(1).float().mean()
    tables.build(rows, None)
    assert hits > 2 * (tables.query(queries, 50, no_shift(tables)).view(-1, 50) == 9).any(1).float().mean()


def test_other_generations_draw_other_functions_and_equal_ones_the_same() -> None:
    rows = normal(50, 8)
    tables, again = LSHTables(8, 2, 4, seed=3), LSHTables(8, 2, 4, seed=3)
    tables.build(rows, None, generation=0)
    first = tables.order.clone()
    tables.build(rows, None, generation=1)
    assert not torch.equal(tables.order, first)
    again.build(rows, None, generation=1)
    assert torch.equal(tables.order, again.order)
    assert torch.equal(tables.starts, again.starts)


@pytest.mark.parametrize(
    ("tables", "bits", "message"), [(0, 4, "tables must be at least 1"), (1, 21, r"bits must be in \[1, 20\], got 21")]
)
def test_refuses_what_does_not_fit(tables: int, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LSHTables(8, tables, bits, seed=0)
