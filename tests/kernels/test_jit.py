import pytest

from lightning_sparse.kernels import scatter_add


def test_a_kernel_is_no_function():
    with pytest.raises(RuntimeError, match="_scatter_add_kernel is a kernel: it has no meaning outside a launch"):
        scatter_add._scatter_add_kernel(1, 2)


def test_a_kernel_is_compiled_once():
    assert scatter_add._scatter_add_kernel.compiled is scatter_add._scatter_add_kernel.compiled
