"""The examples in docstrings run, and every public class has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import lightning_sparse

MODULES = [
    module.name
    for module in pkgutil.walk_packages(lightning_sparse.__path__, "lightning_sparse.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["lightning_sparse", *MODULES])
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", lightning_sparse.__all__)
def test_public_classes_have_an_example(name: str) -> None:
    thing = getattr(lightning_sparse, name)
    if inspect.isclass(thing):
        assert ">>>" in (inspect.getdoc(thing) or "")
