"""Functions that kernels call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def device_function(function: Callable[..., Any]) -> Any:
    """`triton.jit` for functions that kernels call, with cache keys that are equal in all
    processes.

    Triton 3.6 makes the constants of a callee part of its caller's key only where the callee has a
    key already, which it has once any kernel that calls it was launched. A kernel would therefore
    be recompiled by a process that launches other kernels first. Here a callee always has its key.

    Functions and constants that it uses must be defined before it in the module: its key has
    no later definitions.
    """
    compiled = triton.jit(function)
    if isinstance(compiled, JITFunction):  # the interpreter's functions have no keys
        _ = compiled.cache_key
    return compiled
