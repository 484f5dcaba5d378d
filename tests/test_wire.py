"""Bytes from outside: whatever arrives, a codec raises ValueError or gives entries that lie within the vector."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.vector import SparseVector
from tests.laws import CODECS

FEW = settings(max_examples=200, deadline=None, derandomize=True)
SIZES = st.tuples(st.integers(1, 100_000), st.integers(0, 300))
# what a header may say at the ends of its range
EDGES = (0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 999, 300)


def tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def check(name: str, wire: Tensor, numel: int, capacity: int) -> None:
    try:
        vector = CODECS[name].build().decode(wire, numel, capacity)
    except ValueError:
        return
    assert vector.indices.shape == vector.values.shape == (capacity,)
    assert vector.numel == numel
    if capacity:
        low, high = int(vector.indices.min()), int(vector.indices.max())
        assert low >= 0
        assert high < numel


@pytest.mark.parametrize("name", CODECS)
@given(sizes=SIZES, data=st.data())
@FEW
def test_bytes_at_random(name: str, sizes: tuple[int, int], data: st.DataObject) -> None:
    numel, capacity = sizes
    size = CODECS[name].build().nbytes(numel, capacity)
    seed = data.draw(st.integers(0, 2**32 - 1))
    wire = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    check(name, wire, numel, capacity)


@pytest.mark.parametrize("name", [name for name, row in CODECS.items() if row.agreed])
@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("count", EDGES)
def test_headers_at_the_ends_of_their_range(name: str, start: int, count: int) -> None:
    codec = CODECS[name].build()
    wire = codec.encode(SparseVector(torch.ones(300), torch.arange(300, dtype=torch.int32), 1000))
    wire[:16] = torch.tensor([start, count], dtype=torch.int64).view(torch.uint8)
    check(name, wire, 1000, 300)


@pytest.mark.parametrize("name", CODECS)
@given(sizes=SIZES, wire=st.binary(max_size=2000))
@FEW
def test_wrong_lengths_are_refused(name: str, sizes: tuple[int, int], wire: bytes) -> None:
    codec = CODECS[name].build()
    if len(wire) == codec.nbytes(*sizes):
        wire += b"x"
    with pytest.raises(ValueError, match="expected"):
        codec.decode(tensor(wire), *sizes)


@pytest.mark.parametrize("name", CODECS)
@given(start=st.integers(0, 700), position=st.integers(0, 10_000), value=st.integers(0, 255), data=st.data())
@FEW
def test_a_byte_that_was_changed_or_a_tail_that_is_missing(
    name: str, start: int, position: int, value: int, data: st.DataObject
) -> None:
    codec, indices = CODECS[name].build(), torch.arange(start, start + 300, dtype=torch.int32)
    values = torch.randn(300, generator=torch.Generator().manual_seed(start))
    wire = codec.encode(SparseVector(values, indices, 1000))
    wire[position % wire.numel()] = value
    check(name, wire, 1000, 300)
    cut = data.draw(st.integers(0, wire.numel() - 1))
    with pytest.raises(ValueError, match="expected"):
        codec.decode(wire[:cut], 1000, 300)
