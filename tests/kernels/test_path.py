import pytest
import torch

from lightning_sparse.kernels.path import interpret, use_triton


def test_cpu_tensors_take_the_torch_path_unless_asked():
    tensor = torch.zeros(1)
    assert not use_triton(tensor)
    with interpret():
        assert use_triton(tensor)
        with interpret():
            pass
        assert use_triton(tensor)
    assert not use_triton(tensor)


def test_an_error_leaves_the_torch_path_on():
    with pytest.raises(KeyError), interpret():
        raise KeyError
    assert not use_triton(torch.zeros(1))


def test_interpreting_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="expected TRITON_INTERPRET=1 before triton is imported"), interpret():
        pass
