"""Triton's interpreter, with less to do at each call of a function within a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Triton looks through its whole language at each call of a function within a kernel, for what
    it must replace there. The names stay the same; to sort them anew took a third of the time.
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

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_builtin", patch)
        yield
