"""The index of a GGUF file's tensors, by their published names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import astuple

from headstock.errors import ModelError, shorten
from headstock.weights.gguf.block_types import BLOCK_TYPES_BY_NAME
from headstock.weights.gguf.header import GgufTensor
from headstock.weights.gguf.stored_tensor import Interleaving, StoredTensor

INDEX = "model.gguf.index.json"
LINK = "model.gguf"


def make_index(size: int, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The content of the index.   size: bytes of the file"""
    return {
        "size": size,
        "tensors": {
            name: {
                **_describe_place(each.tensor),
                "rows": each.rows and astuple(each.rows),
                "columns": each.columns and astuple(each.columns),
                "offset": each.offset,
                "is_rate": each.is_rate,
                "second": each.second and _describe_place(each.second),
            }
            for name, each in tensors.items()
        },
    }


def _describe_place(tensor: GgufTensor) -> dict[str, Any]:
    """Where a tensor lies."""
    return {"type": tensor.type.name, "shape": list(tensor.shape), "start": tensor.start}


def parse_index(path: Path, index: Mapping[str, Any]) -> tuple[int, dict[str, StoredTensor]]:
    """The size of the file and its tensors, as the index at `path` has them.

    raises: ModelError where a tensor lies outside the file, or is none
    """
    size, tensors = index.get("size"), index.get("tensors")
    if type(size) is not int or not isinstance(tensors, dict):
        raise _make_error(path, "size and tensors")
    found = {name: _parse_tensor(path, name, value, size) for name, value in tensors.items()}
    return size, found


def _parse_tensor(path: Path, name: str, value: object, size: int) -> StoredTensor:
    """One tensor.   raises: ModelError"""
    match value:
        case {
            "rows": rows,
            "columns": columns,
            "offset": int(offset),
            "is_rate": bool(is_rate),
            "second": second,
        } if _is_order(rows) and _is_order(columns):
            pass
        case _:
            raise _make_error(path, name)
    stored = StoredTensor(
        _parse_place(path, name, value, size),
        rows and _make_order(rows),
        columns and _make_order(columns),
        offset,
        is_rate,
        None if second is None else _parse_place(path, name, second, size),
    )
    if not stored.has_whole_blocks:
        raise _make_error(path, name)
    return stored


def _parse_place(path: Path, name: str, value: object, size: int) -> GgufTensor:
    """Where a tensor lies.   raises: ModelError"""
    match value:
        case {
            "type": str(kind),
            "shape": [*shape],
            "start": int(start),
        } if kind in BLOCK_TYPES_BY_NAME and all(type(n) is int and n > 0 for n in shape):
            pass
        case _:
            raise _make_error(path, name)
    type_ = BLOCK_TYPES_BY_NAME[kind]
    tensor = GgufTensor(type_, tuple(shape), start)
    is_whole = shape and not shape[-1] % type_.numbers and start >= 0
    is_aligned = type_.is_packed or not start % type_.nbytes
    if not (is_whole and is_aligned and tensor.nbytes <= size - start):
        raise _make_error(path, name)
    return tensor


def _is_order(value: object) -> bool:
    """Whether a value stands for an order, or for none."""
    match value:
        case None:
            return True
        case [*numbers, [_, *_] as sizes]:
            return len(numbers) == 3 and all(type(each) is int for each in (*numbers, *sizes))
    return False


def _make_order(value: list[Any]) -> Interleaving:
    """The order that a value stands for."""
    start, groups, parts, sizes = value
    return Interleaving(start, groups, parts, tuple(sizes))


def _make_error(path: Path, what: str) -> ModelError:
    """The error for an index that was not written here."""
    return ModelError(f"{path} has no proper entry for {shorten(what)}; remove its folder")
