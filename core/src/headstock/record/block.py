"""Numbers, texts and arrays as bytes, and back."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from headstock.spi.arrays import Ints

INT64 = struct.Struct("<q")


class BlockWriter:
    """Lays values end to end. An array is written as its difference from the last of the same name
    and length: most counters of a schedule go up by one or stay, and what is left compresses well.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.previous: dict[str, Ints] = {}

    def write_int(self, value: int) -> None:
        """Add a whole number."""
        self.parts.append(INT64.pack(value))

    def write_json(self, value: Any) -> None:
        """Add what JSON can hold."""
        data = json.dumps(value, separators=(",", ":")).encode()
        self.write_int(len(data))
        self.parts.append(data)

    def write_array(self, key: str, value: Ints) -> None:
        """Add an array of int32; its shape is not kept."""
        flat = np.ascontiguousarray(value, np.int32).reshape(-1)
        last = self.previous.get(key)
        if last is not None and last.size == flat.size:
            self.write_int(2 * flat.size + 1)
            self.parts.append((flat - last).tobytes())
        else:
            self.write_int(2 * flat.size)
            self.parts.append(flat.tobytes())
        self.previous[key] = flat

    def to_bytes(self) -> bytes:
        """All that was added."""
        return b"".join(self.parts)


class BlockReader:
    """Takes values off in the order in which they were added.

    raises: ValueError when the data ends before one
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0
        self.previous: dict[str, Ints] = {}

    @property
    def is_at_end(self) -> bool:
        """Whether everything was taken."""
        return self.offset == len(self.data)

    def _read_bytes(self, count: int) -> bytes:
        """The next `count` bytes."""
        part = self.data[self.offset : self.offset + count]
        if count < 0 or len(part) != count:
            raise ValueError(f"{count} bytes wanted, {len(part)} left")
        self.offset += count
        return part

    def read_int(self) -> int:
        """The next whole number."""
        value: int = INT64.unpack(self._read_bytes(INT64.size))[0]
        return value

    def read_json(self) -> Any:
        """The next value that JSON held."""
        return json.loads(self._read_bytes(self.read_int()))

    def read_array(self, key: str) -> Ints:
        """The next array.   returns: [n] int32, read-only"""
        size, follows = divmod(self.read_int(), 2)
        value = np.frombuffer(self._read_bytes(4 * size), np.int32)
        if follows:
            last = self.previous.get(key)
            if last is None or last.size != size:
                raise ValueError(f"{key} follows nothing")
            value = value + last
            value.flags.writeable = False
        self.previous[key] = value
        return value
