"""Functions that kernels call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def device_function(function: Callable[..., Any]) -> Any:
    """`triton.jit` of what kernels call, so that their cache keys are the same in every process.

    Triton 3.6 makes the constants of a callee part of its caller's key only where the callee has a
    key already, which it has once any kernel that calls it was launched. So a kernel would be
    compiled anew by a process that launches others before it. Here a callee always has its key.

    What the function uses, functions and constants, stands before it in its module: its key has
    nothing of what is defined later.
    """
    compiled = triton.jit(function)
    if isinstance(compiled, JITFunction):  # the interpreter's functions have no keys
        _ = compiled.cache_key
    return compiled
