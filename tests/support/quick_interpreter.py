"""Triton's interpreter, without work whose result it throws away, and beside any numpy."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Two thirds of the time of the interpreter, for the same results.

    It looks through its whole language at each call of a function within a kernel, for what it must
    replace there: the names stay the same. And it computes whether integers overflow, which it
    would tell in its debug mode alone. Numpy 2.4 refuses how it reads the bounds of a loop.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def list_builtins(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in list_builtins(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_bounds(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builder, "options", options)
        patched.setattr(interpreter, "_patch_builtin", patch)
        patched.setattr(interpreter, "_patch_lang_tensor", patch_bounds)
        yield
