"""The last moment before a step is computed: behind its closure, with the hooks and the clipping in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def behind_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]) -> Any:
    """Arguments of ``step`` that do the same, and ``then`` when the closure has run: hooks in it see no difference."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        then()
        return None

    def run() -> Any:
        result = closure()
        then()
        return result

    return args[:1], {**kwargs, "closure": run}
