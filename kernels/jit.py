"""`jit`: a `triton.jit` that imports triton when a kernel is first used, not when its module is imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any


class jit:  # noqa: N801
    """Marks a function as a Triton kernel, or as a helper that kernels call; index it with a grid to launch it.

    Inside the function `tl` is `triton.language`, and helpers are plain names of the function's module.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self.compiled[grid]

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError(f"{self.__name__} is a kernel: it has no meaning outside a launch")

    @cached_property
    def compiled(self) -> Any:
        """The function as `triton.jit` returns it."""
        import triton
        import triton.language

        # Triton looks names up in the function's module, so helpers must be its own objects there.
        namespace = self.function.__globals__
        namespace["tl"] = triton.language
        code = self.function.__code__
        for name in code.co_names:
            if isinstance(namespace.get(name), jit):
                namespace[name] = namespace[name].compiled
        # Sizes and starts change from call to call: specialised on, they would compile again and again.
        names = code.co_varnames[: code.co_argcount]
        sizes = [name for name in names if name.islower() and not name.endswith("_ptr")]
        return triton.jit(self.function, do_not_specialize=sizes)
