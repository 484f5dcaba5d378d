"""Contract tests over the table in `laws.py`: what every compressor, codec and memory must do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_sparse.accumulator import Difference, MomentumSum, Sum, Vectors
from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector
from tests.laws import CODECS, COMPRESSORS, MEMORIES

DRAW = Draw(seed=1, step=0, name="law")
SIZES = [1, 2, 127, 4099, 131_072 + 1, 300_007]


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def cut(x: Tensor) -> list[Tensor]:
    """The vector in three uneven pieces, one of them empty."""
    third = x.numel() // 3
    return [x[:third].clone(), x[:0].clone(), x[third:].clone()]


def live(vector: SparseVector, agreed: bool = False) -> tuple[Tensor, Tensor]:
    if agreed:  # every entry is meant, zeros too
        return vector.values, vector.indices.long()
    count = int((vector.values != 0).sum())
    assert not vector.values[count:].any()
    assert not vector.indices[count:].any()
    return vector.values[:count], vector.indices[:count].long()


def vectors() -> list[pytest.param]:
    half = torch.cat([torch.zeros(2000), torch.ones(2099)])
    return [
        *(pytest.param(normal(n), id=f"normal-{n}") for n in SIZES),
        pytest.param(torch.zeros(4099), id="zero"),
        pytest.param(torch.full((200_003,), -2.5), id="equal"),
        pytest.param(half, id="half-zero"),
        pytest.param(torch.cat([half, torch.tensor([torch.inf, -torch.inf])]), id="inf"),
        pytest.param(torch.cat([torch.full((3,), torch.nan), half]), id="nan"),
        pytest.param(normal(200_003).exp().pow(4), id="heavy-tail"),
        pytest.param(torch.full((4099,), 1e-42), id="denormal"),
    ]


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("x", vectors())
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_compressor_picks_entries_of_the_vector(name: str, x: Tensor, density: float) -> None:
    compressor = COMPRESSORS[name].build()
    capacity = compressor.capacity(x.numel(), density)
    assert 1 <= capacity <= max(1, round(x.numel() * density) + 1)
    picked = compressor.compress(Vectors(cut(x)), capacity, DRAW)
    agreed = COMPRESSORS[name].agreed
    values, indices = live(picked, agreed)
    assert picked.capacity == capacity
    assert picked.numel == x.numel()
    assert (indices.diff() > 0).all()
    assert indices.numel() == 0 or (indices[0] >= 0 and indices[-1] < x.numel())
    torch.testing.assert_close(values, x[indices], rtol=0, atol=0, equal_nan=True)
    # agreed entries are not looked at: the reducer refuses NaN before
    assert agreed or not values.isnan().any()


@pytest.mark.parametrize("name", [name for name, row in COMPRESSORS.items() if row.exact])
@pytest.mark.parametrize("x", vectors())
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_exact_compressor_picks_the_largest(name: str, x: Tensor, density: float) -> None:
    compressor = COMPRESSORS[name].build()
    capacity = compressor.capacity(x.numel(), density)
    values, _ = live(compressor.compress(Vectors(cut(x)), capacity, DRAW))
    expected = x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().sort(descending=True).values
    expected = expected[:capacity]
    assert torch.equal(values.abs().sort(descending=True).values, expected[expected > 0])


@pytest.mark.parametrize("name", [name for name, row in COMPRESSORS.items() if not row.exact and not row.agreed])
def test_estimating_compressor_comes_near(name: str) -> None:
    x = normal(1_000_003)
    compressor = COMPRESSORS[name].build()
    capacity = compressor.capacity(x.numel(), 0.01)
    values, _ = live(compressor.compress(Vectors(cut(x)), capacity, DRAW))
    best = x.abs().topk(capacity).values.square().sum()
    assert values.square().sum() > 0.8 * best


@pytest.mark.parametrize("name", [name for name, row in COMPRESSORS.items() if not row.agreed])
@pytest.mark.parametrize("numel", [4099, 100_000])
def test_compressor_finds_few_entries_where_denormals_are_flushed(name: str, numel: int) -> None:
    x = torch.zeros(numel)
    x[-20:] = normal(20)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        picked = COMPRESSORS[name].build().compress(Sum(cut(x), cut(torch.zeros(numel))), 1000, DRAW)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(picked.dense(), x)


@pytest.mark.parametrize("name", [name for name, row in COMPRESSORS.items() if not row.agreed])
@pytest.mark.parametrize("numel", [0, 1, 4099, 100_000])
def test_compressor_takes_up_what_it_may_not_send(name: str, numel: int) -> None:
    x, residuals = normal(numel), cut(torch.zeros(numel))
    picked = COMPRESSORS[name].build().compress(Sum(cut(x), residuals), 0, DRAW)
    assert picked.capacity == 0
    assert torch.equal(torch.cat(residuals), x)


@pytest.mark.parametrize("name", [name for name, row in COMPRESSORS.items() if not row.agreed])
@pytest.mark.parametrize("small", [64, 8])
def test_many_small_pieces_count_for_no_more_than_their_entries(name: str, small: int) -> None:
    """Most large magnitudes are small pieces': a sample that saw too many of these would set the bound too high."""
    pieces = [normal(1_000_000), *(10 * normal(64_000, 1)).split(small)]
    compressor = COMPRESSORS[name].build()
    capacity = compressor.capacity(1_064_000, 0.01)
    values, _ = live(compressor.compress(Vectors(pieces), capacity, DRAW))
    assert values.numel() > 0.85 * capacity


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressor_is_a_function_of_its_arguments(name: str) -> None:
    x, compressor = normal(200_003), COMPRESSORS[name].build()
    first = compressor.compress(Vectors(cut(x)), 2000, DRAW)
    second = COMPRESSORS[name].build().compress(Vectors(cut(x)), 2000, DRAW)
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(first.values, second.values)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("numel", [4099, 200_003])
def test_every_coordinate_of_a_constant_gradient_leaves(name: str, numel: int) -> None:
    compressor, gradient, residual = COMPRESSORS[name].build(), torch.ones(numel), torch.zeros(numel)
    density, gone = 0.05, torch.zeros(numel, dtype=torch.bool)
    for step in range(int(6 / density)):
        draw = Draw(seed=0, step=step, name="constant")
        picked = compressor.compress(Sum([gradient], [residual]), compressor.capacity(numel, density), draw)
        _, indices = live(picked, COMPRESSORS[name].agreed)
        residual[indices] = 0
        gone[indices] = True
    assert gone.all(), f"{int((~gone).sum())} coordinates never left"


@pytest.mark.parametrize("name", [name for name, row in COMPRESSORS.items() if row.agreed])
@pytest.mark.parametrize(("numel", "density"), [(1, 0.01), (4099, 0.08), (4099, 0.3), (300_007, 0.01)])
def test_agreed_entries_take_turns(name: str, numel: int, density: float) -> None:
    """The same entries whatever the values, and every one of them in one round, at most twice."""
    compressor = COMPRESSORS[name].build()
    assert compressor.agreed
    capacity = compressor.capacity(numel, density)
    rounds, turns = -(-numel // capacity), torch.zeros(numel, dtype=torch.int64)
    # no entry leaves twice where another waits for longer than the density asks for
    assert rounds == min(numel, math.ceil(1 / density))
    for step in range(7 * rounds, 8 * rounds):
        draw = Draw(seed=0, step=step, name="law")
        one = compressor.compress(Vectors(cut(normal(numel))), capacity, draw)
        other = compressor.compress(Vectors([torch.zeros(numel)]), capacity, draw)
        assert torch.equal(one.indices, other.indices)
        turns[one.indices.long()] += 1
    assert turns.min() == 1
    assert turns.max() <= 2


@pytest.mark.parametrize("name", [name for name, row in COMPRESSORS.items() if row.agreed])
@pytest.mark.parametrize(
    ("density", "seen"),
    [((0.5, 0.3), (0, 1)), ((0.25, 0.25), (0,)), ((0.25, 0.25), (1,))],
    ids=["the density keeps changing", "even steps", "odd steps"],
)
def test_agreed_entries_starve_nobody(name: str, density: tuple[float, float], seen: tuple[int, ...]) -> None:
    """Every entry leaves, whatever the schedule, and if only some exchanges are of this vector."""
    compressor, numel = COMPRESSORS[name].build(), 1000
    turns = torch.zeros(numel, dtype=torch.int64)
    for step in range(2000):
        if step % 2 in seen:
            capacity = compressor.capacity(numel, density[step % 2])
            draw = Draw(seed=0, step=step, name="law")
            turns[compressor.compress(Vectors([torch.zeros(numel)]), capacity, draw).indices.long()] += 1
    assert turns.min() >= 100


@pytest.mark.parametrize("name", COMPRESSORS)
def test_accumulators_agree(name: str) -> None:
    """The same selection from a plain vector, residual + gradient, residual + velocity and weights - anchor."""
    gradient, residual = normal(200_003), normal(200_003, 1)
    compressor = COMPRESSORS[name].build()
    total = residual + gradient
    plain = compressor.compress(Vectors([total]), 2000, DRAW)
    summed = compressor.compress(Sum([gradient], [residual.clone()]), 2000, DRAW)
    differed = compressor.compress(Difference([total], [torch.zeros(200_003)]), 2000, DRAW)
    moved = MomentumSum([gradient], [torch.zeros(200_003)], [residual.clone()], 0.9, 1.0)
    for other in (summed, differed, compressor.compress(moved, 2000, DRAW)):
        assert torch.equal(plain.indices, other.indices)
        assert torch.equal(plain.values, other.values)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_codec_round_trip(name: str, count: int) -> None:
    row = CODECS[name]
    codec, numel = row.build(), 50_000
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(numel, generator=generator)[:count].sort().values
    indices = torch.arange(70, 70 + count) if row.agreed else indices
    values = torch.cat([normal(count), torch.zeros(7)])
    vector = SparseVector(values, torch.cat([indices, torch.zeros(7, dtype=torch.long)]).int(), numel)
    wire = codec.encode(vector)
    assert wire.dtype is torch.uint8
    assert wire.shape == (codec.nbytes(numel, vector.capacity),)
    decoded = codec.decode(wire, numel, vector.capacity)
    assert torch.equal(decoded.indices, vector.indices)
    error = (decoded.values - values).abs()
    if row.agreed:
        assert error.square().sum() <= row.energy_error * values.square().sum()
    else:
        assert torch.equal(decoded.values, values) if row.exact else (error <= row.relative_error * values.abs()).all()
    assert decoded.values.dtype is torch.float32


@pytest.mark.parametrize("name", [name for name, row in CODECS.items() if row.agreed])
@pytest.mark.parametrize("shape", ["zero", "spike", "equal", "tiny", "huge", "larger", "heavy"])
def test_codec_never_adds_error(name: str, shape: str) -> None:
    """What is left after sending is no longer than what there was, whatever the values."""
    spike = torch.zeros(300)
    spike[7] = -3.0
    shapes = {"zero": torch.zeros(300), "spike": spike, "equal": torch.full((300,), 0.5)}
    shapes |= {
        "tiny": normal(300) * 1e-9,
        "huge": normal(300) * 1e9,
        "larger": normal(300) * 1e30,
        "heavy": normal(300).pow(7),
    }
    values = shapes[shape]
    codec = CODECS[name].build()
    wire = codec.encode(SparseVector(values, torch.arange(5, 305, dtype=torch.int32), 400))
    decoded = codec.decode(wire, 400, 300)
    assert decoded.indices.tolist() == list(range(5, 305))
    assert (decoded.values - values).double().square().sum() <= values.double().square().sum() * (1 + 1e-6)


@pytest.mark.parametrize("name", [name for name, row in CODECS.items() if row.agreed])
def test_codec_keeps_up_with_what_moves_faster(name: str) -> None:
    """One entry in eight moves 4 in every exchange, the others 1: none is ever more than 6 behind."""
    codec, indices = CODECS[name].build(), torch.arange(300, dtype=torch.int32)
    step = torch.where(indices % 8 == 0, 4.0, 1.0) * torch.where(indices % 2 == 0, 1.0, -1.0)
    left = torch.zeros(300)
    for _ in range(300):
        left += step
        wire = codec.encode(SparseVector(left, indices, 300))
        left -= codec.decode(wire, 300, 300).values
        assert left.abs().max() <= 6


@pytest.mark.parametrize("name", [name for name, row in CODECS.items() if row.agreed])
def test_codec_for_blocks_refuses_other_entries(name: str) -> None:
    vector = SparseVector(normal(3), torch.tensor([1, 2, 9], dtype=torch.int32), 10)
    with pytest.raises(ValueError, match=r"expected neighbouring entries.*WeightBlocks"):
        CODECS[name].build().encode(vector)


@pytest.mark.parametrize("name", CODECS)
def test_codec_tells_receivers_of_nan(name: str) -> None:
    vector = SparseVector(torch.full((4,), torch.nan), torch.arange(4, dtype=torch.int32), 10)
    codec = CODECS[name].build()
    assert codec.decode(codec.encode(vector), 10, 4).values.isnan().all()


@pytest.mark.parametrize("name", CODECS)
def test_codec_refuses_other_payloads(name: str) -> None:
    codec = CODECS[name].build()
    vector = SparseVector(normal(8), torch.arange(8, dtype=torch.int32), 100)
    wire = codec.encode(vector)
    with pytest.raises(ValueError, match="payload"):
        codec.decode(wire[:-1], 100, 8)
    with pytest.raises(ValueError, match="payload"):
        codec.decode(wire.float(), 100, 8)
    with pytest.raises(ValueError, match="corrupt"):
        codec.decode(torch.full_like(wire, 0xFF), 100, 8)


NAMES = ["a", "b", "c"]


def one_step(memory: object, gradients: list[Tensor], capacity: int = 40) -> Tensor:
    """Accumulate, pick the largest, discard; what left, as a dense vector."""
    accumulator = memory.accumulate(NAMES, gradients)
    picked = COMPRESSORS["TopK"].build().compress(accumulator, capacity, DRAW)
    memory.discard(NAMES, picked)
    return picked.dense()


@pytest.mark.parametrize("name", [name for name, row in MEMORIES.items() if row.exact])
def test_memory_telescopes(name: str) -> None:
    """What came in is what has left plus what is kept, to float32 rounding of 50 additions."""
    memory, came, left = MEMORIES[name].build(), torch.zeros(901), torch.zeros(901)
    velocity = torch.zeros(901)
    for step in range(50):
        gradient = normal(901, step)
        # the momentum memory owes what its velocity says, and forgets the velocity where an entry leaves
        if name == "MomentumResidual":
            velocity = 0.9 * velocity + gradient
            came += velocity
        else:
            came += gradient
        sent = one_step(memory, cut(gradient))
        velocity[sent != 0] = 0
        left += sent
    kept = torch.cat([memory.state_dict()["residual"][name] for name in NAMES])
    torch.testing.assert_close(came, left + kept, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_continues_from_its_state(name: str) -> None:
    memory = MEMORIES[name].build()
    for step in range(3):
        one_step(memory, cut(normal(901, step)))
    other = MEMORIES[name].build()
    other.load_state_dict({kind: {k: v.clone() for k, v in x.items()} for kind, x in memory.state_dict().items()})
    for step in range(3, 6):
        gradients = cut(normal(901, step))
        assert torch.equal(one_step(memory, gradients), one_step(other, [g.clone() for g in gradients]))


@pytest.mark.parametrize("name", [name for name, row in MEMORIES.items() if row.exact])
def test_memory_survives_other_groupings(name: str) -> None:
    """DDP sends the whole model first and buckets in another order later: state follows the parameter's name."""
    gradients = dict(zip(NAMES, cut(normal(901)), strict=True))
    whole, grouped = MEMORIES[name].build(), MEMORIES[name].build()
    for order in (NAMES, ["c", "a", "b"]):
        for memory in (whole, grouped):
            names = NAMES if memory is whole else order
            memory.accumulate(names, [gradients[n].clone() for n in names]).pieces()
    for n in NAMES:
        assert torch.equal(whole.state_dict()["residual"][n], grouped.state_dict()["residual"][n])


@pytest.mark.parametrize("name", [name for name, row in MEMORIES.items() if row.exact])
def test_memory_takes_entries_back_and_sets_slots_aside(name: str) -> None:
    memory = MEMORIES[name].build()
    one_step(memory, cut(normal(901)))
    before = {k: v.clone() for k, v in memory.state_dict()["residual"].items()}
    entries = SparseVector(torch.tensor([2.0, 3.0]), torch.tensor([0, 900], dtype=torch.int32), 901)
    memory.give_back(NAMES, entries)
    after = memory.state_dict()["residual"]
    assert after["a"][0] == before["a"][0] + 2
    assert after["c"][-1] == before["c"][-1] + 3
    held = memory.hold(["a"])
    memory.accumulate(["a"], [torch.zeros(300)]).pieces()
    memory.release(held)
    assert memory.state_dict()["residual"]["a"][0] == before["a"][0] + 2


@pytest.mark.parametrize("name", [name for name, row in MEMORIES.items() if row.exact])
def test_memory_refuses_another_models_state(name: str) -> None:
    memory = MEMORIES[name].build()
    one_step(memory, cut(normal(901)))
    with pytest.raises(ValueError, match="Residual of 'a' has 300 elements, expected 301"):
        memory.accumulate(["a"], [torch.zeros(301)])
