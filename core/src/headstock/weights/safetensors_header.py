"""Read the header of a safetensors file, and check it against the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock.errors import ModelError, describe_type, shorten
from headstock.weights.formats import is_lfs_pointer

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

_DAMAGED_HINT = "the file is damaged: copy or download it again"

_MAX_HEADER_BYTES = 100_000_000
"""The most bytes of a header, as the format's own library has it."""


@frozen
class TensorEntry:
    """One tensor of a file: its dtype in the format's words, its shape, and its bytes.

    `start` and `stop` count from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the tensors of a safetensors file, by name, in the order of their bytes.

    raises: ModelError when the file is truncated, or its header contradicts itself
    """
    try:
        if is_lfs_pointer(path):
            raise ModelError(f"{path} is a Git LFS pointer: fetch the file with git lfs pull")
        size, text = _read_header_text(path)
        header = json.loads(text, object_pairs_hook=_reject_repeats)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {shorten(error.strerror)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not JSON: {shorten(error)}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header: expected a JSON object, got {describe_type(header)}")
    entries = {
        name: _parse_entry(path, name, value)
        for name, value in header.items()
        if name != "__metadata__"
    }
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_layout(path, ordered, size - 8 - len(text))
    return ordered


def _read_header_text(path: Path) -> tuple[int, bytes]:
    """Read the size of the file and the bytes of its header.   raises: ModelError"""
    size = path.stat().st_size
    with path.open("rb") as file:
        # The length is the file's own claim: it is compared before that many bytes are read.
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            damaged = f"a header of {length} bytes cannot be in a file of {size}"
            raise ModelError(f"{path}: {damaged}; {_DAMAGED_HINT}")
        return size, file.read(length)


def _reject_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of the pairs.   raises: ValueError when a name comes twice"""
    # json keeps the last of two equal names, so the bytes of the first would belong to no tensor.
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a name comes twice")
    return mapping


def _parse_entry(path: Path, name: str, value: Any) -> TensorEntry:
    """Parse the description of one tensor, and check that it agrees with itself.

    raises: ModelError
    """
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if (
            all(type(n) is int and n >= 0 for n in shape)
        ):
            pass
        case _:
            raise ModelError(
                f"{path}: {shorten(name)} has no proper dtype, shape and data_offsets in the header"
            )
    if dtype not in _ITEM_BYTES:
        raise ModelError(
            f"{path}: {shorten(name)}: expected one of {', '.join(_ITEM_BYTES)}, got "
            f"{shorten(dtype)}"
        )
    if stop - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ModelError(
            f"{path}: {shorten(name)} is {dtype} {shorten(shape)}, but has {stop - start} bytes in "
            "the header"
        )
    return TensorEntry(dtype, tuple(shape), start, stop)


def _check_layout(path: Path, entries: dict[str, TensorEntry], data: int) -> None:
    """Check that the tensors lie one after another and fill the file's `data` bytes.

    raises: ModelError
    """
    # The format allows no gaps: bytes that no tensor owns could hide anything, and an overlap would
    # load one tensor as part of another.
    end = 0
    for name, tensor in entries.items():
        if tensor.start != end:
            how = "overlaps another tensor" if tensor.start < end else "leaves a gap before it"
            raise ModelError(
                f"{path}: {shorten(name)} {how}: expected it at byte {end}, got {tensor.start}"
            )
        end = tensor.stop
    if end != data:
        raise ModelError(
            f"{path}: the tensors take {end} bytes, but the file has {data} for them; "
            f"{_DAMAGED_HINT}"
        )
