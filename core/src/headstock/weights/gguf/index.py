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
                "type": each.tensor.type.name,
                "shape": list(each.tensor.shape),
                "start": each.tensor.start,
                "rows": each.rows and astuple(each.rows),
                "columns": each.columns and astuple(each.columns),
                "offset": each.offset,
                "is_rate": each.is_rate,
            }
            for name, each in tensors.items()
        },
    }


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
            "type": str(kind),
            "shape": [*shape],
            "start": int(start),
            "rows": rows,
            "columns": columns,
            "offset": int(offset),
            "is_rate": bool(is_rate),
        } if (
            kind in BLOCK_TYPES_BY_NAME
            and all(type(n) is int and n > 0 for n in shape)
            and _is_order(rows)
            and _is_order(columns)
        ):
            pass
        case _:
            raise _make_error(path, name)
    type_ = BLOCK_TYPES_BY_NAME[kind]
    tensor = GgufTensor(type_, tuple(shape), start)
    is_whole = shape and not shape[-1] % type_.numbers and start >= 0
    is_aligned = type_.is_packed or not start % type_.nbytes
    if not (is_whole and is_aligned and tensor.nbytes <= size - start):
        raise _make_error(path, name)
    stored = StoredTensor(
        tensor, rows and Interleaving(*rows), columns and Interleaving(*columns), offset, is_rate
    )
    if not stored.has_whole_blocks:
        raise _make_error(path, name)
    return stored


def _is_order(value: object) -> bool:
    """Whether a value stands for an order, or for none."""
    if value is None:
        return True
    return isinstance(value, list) and [type(each) for each in value] == [int] * 4


def _make_error(path: Path, what: str) -> ModelError:
    """The error for an index that was not written here."""
    return ModelError(f"{path} has no proper entry for {shorten(what)}; remove its folder")
