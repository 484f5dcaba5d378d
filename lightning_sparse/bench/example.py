"""Example scripts as the benches take them: a file with a function `problem`, and its arguments."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def load_problem(path: Path) -> Any:
    """The function `problem` of an example script.

    Raises:
        SystemExit: there is no such file, or it has no such function.
    """
    if not path.is_file():
        raise SystemExit(f"bench: expected an example script, got {path}: give its path in a checkout with --example")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "problem"):
        raise SystemExit(f"bench: expected a function `problem` in {path}, got none")
    return module.problem


def parse_arguments(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE as keyword arguments; a VALUE that is a number becomes one.

    Raises:
        SystemExit: a pair has no `=`.
    """
    out: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SystemExit(f"bench: --set expected NAME=VALUE, got {pair!r}")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = value
    return out
