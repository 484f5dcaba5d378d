"""Registers the strategies in each Lightning tree, now or as soon as the tree is imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

_HOMES = {
    "pytorch_lightning.strategies": "lightning_sparse.pytorch_lightning",
    "lightning.pytorch.strategies": "lightning_sparse.lightning",
}
_METHODS = {
    "sparse_ddp": "popen",
    "sparse_ddp_spawn": "spawn",
    "sparse_ddp_fork": "fork",
    "sparse_ddp_notebook": "fork",
}


def register_trees() -> None:
    """Register in trees that are imported; watch for those that are not, without importing them."""
    for tree in _HOMES:
        if (module := sys.modules.get(tree)) is not None and hasattr(module, "StrategyRegistry"):
            _register(module)
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register(strategies: ModuleType) -> None:
    registry, home = strategies.StrategyRegistry, _HOMES[strategies.__name__]
    for name, method in _METHODS.items():
        for suffix, unused in (
            ("", None),
            ("_find_unused_parameters_true", True),
            ("_find_unused_parameters_false", False),
        ):
            if name + suffix in registry:
                continue
            options: dict[str, Any] = {} if unused is None else {"find_unused_parameters": unused}
            # the class is imported when it is built, so that importing the package stays cheap
            registry.register(
                name + suffix,
                partial(_build, home),
                description=f"DDP over a sparse exchange with `start_method` '{method}'",
                start_method=method,
                **options,
            )


def _build(home: str, **options: Any) -> Any:
    return importlib.import_module(home).SparseDDPStrategy(**options)


class _Watch(importlib.abc.MetaPathFinder):
    """Lets the import of a tree's strategies run as usual and registers ours right after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _HOMES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
