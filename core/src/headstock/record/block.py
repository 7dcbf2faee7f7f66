"""Numbers, texts and arrays as bytes, and back."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from headstock.spi.arrays import Ints

INT64 = struct.Struct("<q")


class BlockWriter:
    """Lays values end to end.

    An array is written as its difference from the previous one of the same key and length.
    """

    # Rows of a schedule are mostly those of the step before, and counters go up by one. The
    # differences are mostly equal, so even the fastest level of zlib packs them well.

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.previous: dict[str, Ints] = {}

    def write_int(self, value: int) -> None:
        """Add an integer of 64 bits."""
        self.parts.append(INT64.pack(value))

    def write_json(self, value: Any) -> None:
        """Add a value that JSON can hold."""
        data = json.dumps(value, separators=(",", ":")).encode()
        self.write_int(len(data))
        self.parts.append(data)

    def write_array(self, key: str, value: Ints) -> None:
        """Add an array of int32, flattened."""
        flat = np.ascontiguousarray(value, np.int32).reshape(-1)
        last = self.previous.get(key)
        if last is not None and last.size == flat.size:
            self.write_int(2 * flat.size + 1)  # the lowest bit: differences follow
            self.parts.append((flat - last).tobytes())
        else:
            self.write_int(2 * flat.size)
            self.parts.append(flat.tobytes())
        self.previous[key] = flat

    def to_bytes(self) -> bytes:
        """Return the bytes of all that was added."""
        return b"".join(self.parts)


class BlockReader:
    """Reads values in the order in which they were added.

    raises: ValueError when the data ends early
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0
        self.previous: dict[str, Ints] = {}

    @property
    def is_at_end(self) -> bool:
        """Whether all data was read."""
        return self.offset == len(self.data)

    def _read_bytes(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        part = self.data[self.offset : self.offset + count]
        if count < 0 or len(part) != count:
            raise ValueError(f"expected {count} more bytes, got {len(part)}")
        self.offset += count
        return part

    def read_int(self) -> int:
        """Return the next integer."""
        value: int = INT64.unpack(self._read_bytes(INT64.size))[0]
        return value

    def read_json(self) -> Any:
        """Return the next value that JSON held."""
        return json.loads(self._read_bytes(self.read_int()))

    def read_array(self, key: str) -> Ints:
        """Return the next array.   returns: [n] int32, read-only"""
        size, is_difference = divmod(self.read_int(), 2)
        value = np.frombuffer(self._read_bytes(4 * size), np.int32)
        if is_difference:
            last = self.previous.get(key)
            if last is None or last.size != size:
                raise ValueError(f"{key} is a difference from an array that is missing")
            value = value + last
            value.flags.writeable = False
        self.previous[key] = value
        return value
