"""Find out whether a CUDA graph can replay what a decoder's modules compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headstock.nn.meta_batch import make_meta_batch
from headstock.spi import ModelConfig
from headstock_transformers.attention import PAGED, PROBED, STEP, Step
from headstock_transformers.module import Decoder, in_one_line
from headstock_transformers.operations import PLAIN, computing_with

_TOKENS = 8

_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
"""What makes tensors of numbers that Python holds; each number goes to the device."""
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_BY_MASKS = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Operations that count the entries of a mask on the host, where one of their indices is a mask."""
_COPYING = ("_to_copy", "copy", "copy_", "where", *_BY_MASKS)
"""Operations that copy even a single number of the host to the device."""


class _Obstacle(Exception):
    """A capture would fail here; says why."""


def find_obstacle(decoder: Decoder, config: ModelConfig) -> str:
    """What keeps a CUDA graph from replaying steps and scores, in words; empty for nothing.

    The modules run once on the meta device, as steps run them. What depends on the device, such as
    kernels that read sizes on the host for some types, is not found.
    """
    model = decoder.model
    names = {id(module): name for name, module in model.named_modules()}
    before = _list_attributes(model)
    model.set_attn_implementation(PAGED)
    step = Step(make_meta_batch(config, _TOKENS), config, _attend_nothing, PLAIN)
    token = STEP.set(step)
    obstacles: list[str] = []
    try:
        # Without inference mode, in which operations hide those that they are made of.
        with (
            torch.no_grad(),
            computing_with(PLAIN),
            _WatchedOperations(obstacles),
            _WatchedNumbers(obstacles),
        ):
            decoder.run_head(decoder.run_base(step.batch.tokens, step.batch.positions))
    except _Obstacle as obstacle:
        return f"{_find_module(obstacle.__traceback__, names)} {obstacle}"
    except Exception as error:
        place = _find_module(error.__traceback__, names)
        return f"{place} cannot be followed on shapes alone: {in_one_line(error)}"
    finally:
        STEP.reset(token)
        model.set_attn_implementation(PROBED)
    # Modules may catch what is raised.
    if obstacles:
        return f"{type(model).__name__} {obstacles[0]}"
    changed = next(iter(_list_changes(before, _list_attributes(model), names)), None)
    return f"{changed}, which a replay would not" if changed else ""


def _attend_nothing(q: Tensor, layer: int) -> Tensor:
    """What has the shape of attention, as wide as the pool."""
    pool = STEP.get().batch.pools[layer]
    return q.new_zeros(*q.shape[:-1], pool.shape[-1])


class _WatchedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `_Obstacle` at the first operation that a capture would not survive.

    writes: obstacles, the reasons
    """

    def __init__(self, obstacles: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.obstacles = obstacles

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        reason = _explain_operation(func, name, args, kwargs)
        if reason:
            self.obstacles.append(reason)
            raise _Obstacle(reason)
        if name == "_grouped_mm":
            # On the meta device it wants bfloat16, which the weights are not yet.
            return args[0].new_zeros(args[0].shape[0], args[1].shape[-1])
        return func(*args, **kwargs)


class _WatchedNumbers(TorchFunctionMode):
    """Raises `_Obstacle` where Python's numbers go to the device, which no operation shows.

    writes: obstacles, the reasons
    """

    def __init__(self, obstacles: list[str]) -> None:
        super().__init__()
        self.obstacles = obstacles

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        reason = ""
        if func in _INDEXING and any(isinstance(each, list) for each in _list_indices(args[1])):
            reason = "indexes by a list, which is copied to the device"
        result = func(*args, **kwargs)
        # By slices it fills; by tensors it stores a tensor, which begins on the host.
        if (
            func is Tensor.__setitem__
            and not isinstance(args[2], Tensor)
            and any(isinstance(each, Tensor) for each in _list_indices(args[1]))
        ):
            reason = "stores a number by an index, which copies it to the device"
        if func in _FROM_NUMBERS and result.is_meta:
            data = args[-1] if args else next(iter(kwargs.values()))
            if not (isinstance(data, Tensor) and data.is_meta):
                reason = f"copies numbers to the device ({func.__name__})"
        if reason:
            self.obstacles.append(reason)
            raise _Obstacle(reason)
        return result


def _list_indices(index: Any) -> tuple[Any, ...]:
    """The parts of an index."""
    return index if isinstance(index, tuple) else (index,)


def _explain_operation(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Why the operation cannot be captured; empty if it can be."""
    if func.namespace not in ("aten", "prim", "prims"):
        return f"calls {func.namespace}::{name}, which is not known to be capturable"
    tensors = list(_list_tensors((*args, *kwargs.values())))
    waits = f"waits for the device ({name})"
    if name in _BY_MASKS:
        masks = (torch.bool, torch.uint8)
        if any(each is not None and each.dtype in masks for each in args[1]):
            return f"waits for the device ({name} by a mask)"
    elif name == "repeat_interleave" and kwargs.get("output_size") is not None:
        pass
    elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
        # A number that the host holds can be read.
        return waits if any(each.is_meta for each in tensors) else ""
    to = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if to == "cpu" and any(each.is_meta for each in tensors):
        return waits
    return _explain_copies(name, tensors, to)


def _explain_copies(name: str, tensors: Sequence[Tensor], to: str | None) -> str:
    """Why tensors of the host keep an operation from being captured; empty if they do not.

    to: the type of the device that the operation is told
    """
    is_on_device = to == "meta" or any(each.is_meta for each in tensors)
    hosts = [each for each in tensors if not each.is_meta]
    # A single number is an argument of the kernel.
    if is_on_device and any(each.dim() or name in _COPYING for each in hosts):
        return f"copies a tensor of the host to the device ({name})"
    return ""


def _list_tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, at any depth."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _list_tensors(value)


def _find_module(trace: TracebackType | None, names: Mapping[int, str]) -> str:
    """The innermost module whose code ran."""
    found = "the model"
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            found = names[id(module)]
        trace = trace.tb_next
    return found


def _list_attributes(model: nn.Module) -> dict[tuple[int, str], Any]:
    """(module, attribute) -> tensors and plain values that the modules hold."""
    return {
        (id(module), name): value
        for module in model.modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if isinstance(value, Tensor | bool | int | float | str | None)
    }


def _list_changes(
    before: Mapping[tuple[int, str], Any],
    after: Mapping[tuple[int, str], Any],
    names: Mapping[int, str],
) -> Iterator[str]:
    """What modules have set."""
    for key, value in after.items():
        old = before.get(key, before)
        has_tensor = isinstance(value, Tensor) or isinstance(old, Tensor)
        if old is not value and (has_tensor or old != value):
            yield f"{names.get(key[0]) or 'the model'} sets {key[1]} as it runs"
