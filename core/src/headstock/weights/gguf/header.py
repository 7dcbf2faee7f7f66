"""Read the header of a GGUF file, and check it against the file.

It is untrusted: every count and length is compared with what the file has before memory is taken.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen

from headstock.errors import ModelError, shorten
from headstock.weights.formats import is_lfs_pointer
from headstock.weights.gguf.block_types import BLOCK_TYPES, UNREAD_NAMES, BlockType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4

_MAX_HEADER_BYTES = 256 << 20
"""The most bytes of a header: vocabularies of 300,000 tokens take 10 MB."""

_STRING, _ARRAY = 8, 9

_NUMBERS: Mapping[int, tuple[str, str]] = {
    0: ("<B", "B"), 1: ("<b", "b"), 2: ("<H", "H"), 3: ("<h", "h"), 4: ("<I", "I"), 5: ("<i", "i"),
    6: ("<f", "f"), 7: ("<?", "B"), 10: ("<Q", "Q"), 11: ("<q", "q"), 12: ("<d", "d"),
}  # fmt: skip
"""Types of values -> how `struct` and `array` call them."""

_DAMAGED_HINT = "the file is damaged: copy or download it again"


class HeaderError(Exception):
    """What is wrong with a header."""


@frozen
class GgufTensor:
    """A tensor of a file.

    shape: the last dimension is that of rows, as elsewhere
    start: its first byte in the file
    """

    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return count_bytes(self.type, self.shape)


@frozen
class GgufHeader:
    """What a GGUF file says of itself.

    metadata: texts, numbers, and sequences of either, by key
    size: bytes of the file
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    size: int


def count_bytes(type: BlockType, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor takes."""
    return math.prod(shape) // type.numbers * type.nbytes


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    raises: ModelError when the file is truncated, or its header contradicts itself
    """
    try:
        if is_lfs_pointer(path):
            raise ModelError(f"{path} is a Git LFS pointer: fetch the file with git lfs pull")
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise HeaderError(f"a file of {size} bytes has no header; {_DAMAGED_HINT}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(data))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {shorten(error.strerror)}") from error
    except HeaderError as error:
        raise ModelError(f"{path}: {error}") from error


class _Cursor:
    """A place in the header's bytes, which moves over what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.end = min(len(data), _MAX_HEADER_BYTES)
        self.at = 0

    def take(self, count: int) -> int:
        """Move over bytes.   returns: where they begin    raises: HeaderError"""
        start = self.at
        if count > self.end - start:
            raise HeaderError(
                f"{count} bytes at byte {start} of the header do not fit into the {self.end} that "
                f"it may have; {_DAMAGED_HINT}"
            )
        self.at = start + count
        return start

    def read_number(self, kind: str) -> int | float:
        """A number.   raises: HeaderError"""
        number: int | float
        (number,) = struct.unpack_from(kind, self.data, self.take(struct.calcsize(kind)))
        return number

    def read_count(self, kind: str = "<Q") -> int:
        """A whole number of the file's own claim.   raises: HeaderError"""
        return int(self.read_number(kind))

    def read_text(self) -> str:
        """A text.   raises: HeaderError"""
        length = self.read_count()
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise HeaderError(
                f"the text at byte {start} of the header is not UTF-8; {_DAMAGED_HINT}"
            ) from None


def _read(cursor: _Cursor) -> GgufHeader:
    """Read what the file begins with.   raises: HeaderError"""
    start = cursor.take(4)
    if cursor.data[start : start + 4] != _MAGIC:
        raise HeaderError("the file does not begin with GGUF, so it is in another format")
    version = cursor.read_count("<I")
    if version not in _VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "big-endian" if is_swapped else f"of version {version}"
        raise HeaderError(f"the file is {what}, and little-endian versions 2 and 3 are read")
    num_tensors, num_values = cursor.read_count(), cursor.read_count()
    metadata: dict[str, object] = {}
    for _ in range(num_values):
        key = cursor.read_text()
        if key in metadata:
            raise HeaderError(f"the key {shorten(key)} comes twice")
        metadata[key] = _read_value(cursor, key)
    claims = list(_read_claims(cursor, num_tensors))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if (
        type(alignment) is not int
        or not 8 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise HeaderError(
            f"general.alignment: expected a power of 2 from 8 to {_MAX_ALIGNMENT}, got "
            f"{shorten(repr(alignment))}"
        )
    return GgufHeader(metadata, _place(cursor, claims, alignment), cursor.size)


def _read_value(cursor: _Cursor, key: str) -> object:
    """Read a value of any type.   raises: HeaderError"""
    kind = cursor.read_count("<I")
    if kind in _NUMBERS:
        return cursor.read_number(_NUMBERS[kind][0])
    if kind == _STRING:
        return cursor.read_text()
    if kind != _ARRAY:
        raise HeaderError(f"{shorten(key)} has a value of the unknown type {kind}")
    item, count = cursor.read_count("<I"), cursor.read_count()
    if item == _STRING:
        # Each takes 8 bytes or more, so that the file's end ends a count that is too large.
        return tuple(cursor.read_text() for _ in range(count))
    if item not in _NUMBERS:
        raise HeaderError(f"{shorten(key)} is a list of the type {item}, which is not read")
    numbers = array(_NUMBERS[item][1])
    nbytes = count * numbers.itemsize
    start = cursor.take(nbytes)
    numbers.frombytes(cursor.data[start : start + nbytes])
    return numbers


@frozen
class _Claim:
    """What a header says of a tensor."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int


def _read_claims(cursor: _Cursor, count: int) -> Iterator[_Claim]:
    """Read what the header says of each tensor.   raises: HeaderError"""
    for _ in range(count):
        name = cursor.read_text()
        num_dimensions = cursor.read_count("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise HeaderError(
                f"{shorten(name)}: expected 1 to {_MAX_DIMENSIONS} dimensions, got {num_dimensions}"
            )
        shape = tuple(cursor.read_count() for _ in range(num_dimensions))[::-1]
        type, offset = cursor.read_count("<I"), cursor.read_count()
        if type not in BLOCK_TYPES:
            raise HeaderError(
                f"{shorten(name)} is {UNREAD_NAMES.get(type, f'of the type {type}')}, and "
                f"{', '.join(each.name for each in BLOCK_TYPES.values())} are read; choose a file "
                "in one of these, such as Q8_0 or Q4_K_M"
            )
        yield _Claim(name, BLOCK_TYPES[type], shape, offset)


def _place(cursor: _Cursor, claims: list[_Claim], alignment: int) -> dict[str, GgufTensor]:
    """Check that the tensors lie one after another inside the file.   raises: HeaderError"""
    data = _align(cursor.at, alignment)
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for each in sorted(claims, key=lambda claim: claim.offset):
        name, title = each.name, f"{shorten(each.name)} {each.type.name} {shorten(each.shape)}"
        if name in tensors:
            raise HeaderError(f"the tensor {shorten(name)} comes twice")
        if not all(each.shape) or each.shape[-1] % each.type.numbers:
            raise HeaderError(
                f"{title}: expected dimensions above 0 and rows of whole blocks of "
                f"{each.type.numbers}; {_DAMAGED_HINT}"
            )
        # The format allows no gaps but for the alignment; an overlap would load one tensor as part
        # of another.
        if each.offset != end:
            raise HeaderError(f"{title}: expected it at byte {end}, got {each.offset}")
        nbytes = count_bytes(each.type, each.shape)
        if nbytes > cursor.size - data - each.offset:
            raise HeaderError(
                f"{title} takes {nbytes} bytes from byte {data + each.offset} on, and the file "
                f"has {cursor.size}; {_DAMAGED_HINT}"
            )
        tensors[name] = GgufTensor(each.type, each.shape, data + each.offset)
        end = _align(each.offset + nbytes, alignment)
    return tensors


def _align(at: int, alignment: int) -> int:
    """The next aligned byte."""
    return -(-at // alignment) * alignment
