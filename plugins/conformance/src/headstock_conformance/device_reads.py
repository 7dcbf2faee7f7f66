"""Detect device reads on a CPU: on a GPU the host would wait, and a graph would not repeat them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__array__",
        "__contains__",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "is_nonzero",
        "equal",
        "allclose",
        "bincount",
    }
)
"""Functions of torch whose result, or its shape, the host must know."""
DISPATCHED = frozenset(
    {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
        "is_nonzero",
    }
)
"""The same as operators, which torch's own functions call."""


class DeviceRead(AssertionError):
    """Something reads a number from the device."""


def _refuse(name: str) -> None:
    raise DeviceRead(
        f"it reads the device by {name}: on a GPU the host would wait, and a graph repeat what it "
        "read at the capture; compute with tensors, such as by torch.where"
    )


class _Functions(TorchFunctionMode):
    """Refuses functions that read."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, unless it reads."""
        name = getattr(func, "__name__", "")
        if name in READS:
            _refuse(f"Tensor.{name}")
        # Writing one value at a bool index needs no count.
        is_read = name == "__getitem__" or (
            name == "__setitem__" and isinstance(args[2], Tensor) and args[2].dim() > 0
        )
        if is_read and _has_bools(args[1]):
            _refuse("an index of bools")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that read."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator, unless it reads."""
        name = func.overloadpacket.__name__
        if name in DISPATCHED:
            _refuse(f"torch.ops.aten.{name}")
        return func(*args, **(kwargs or {}))


def _has_bools(index: Any) -> bool:
    """Whether an index has a tensor of bools."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in parts)


@contextmanager
def forbid_device_reads() -> Iterator[None]:
    """Raise DeviceRead where the block reads a number from a tensor."""
    operators: Any = _Operators
    with _Functions(), operators():
        yield
