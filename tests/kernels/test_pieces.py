import torch

from lightning_sparse.kernels.pieces import block_table, bounds_of, device_table, index_dtype, is_aligned

CPU = torch.device("cpu")


def test_bounds():
    assert bounds_of([]) == [0]
    assert bounds_of([torch.zeros(3), torch.zeros(0), torch.zeros(2)]) == [0, 3, 3, 5]


def test_indices_grow_when_int32_ends():
    assert index_dtype(2**31 - 1) == torch.int32
    assert index_dtype(2**31) == torch.int64


def test_blocks_belong_to_one_piece():
    first_block, piece_of_block = block_table([0, 5, 5, 9, 10], 4, CPU)
    assert first_block == [0, 2, 2, 3, 4]
    assert piece_of_block.tolist() == [0, 0, 2, 3]
    assert piece_of_block.dtype == torch.int32


def test_a_table_is_made_once():
    table = device_table([(1, 2**40), (3, 4)], CPU)
    assert table.tolist() == [[1, 2**40], [3, 4]]
    assert device_table([[1, 2**40], [3, 4]], CPU) is table
    assert device_table([[1, 2**40], [3, 5]], CPU) is not table


def test_alignment():
    memory = torch.zeros(16)
    assert is_aligned([memory[4:], memory[8:]])
    assert not is_aligned([memory, memory[1:]])
