"""Numbers, texts and arrays as bytes, and back."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from headstock.spi.arrays import Ints

NUMBER = struct.Struct("<q")


class BlockWriter:
    """Lays values end to end. An array is written as its difference from the last of the same name
    and length: most counters of a schedule go up by one or stay, and what is left compresses well.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.last: dict[str, Ints] = {}

    def number(self, value: int) -> None:
        """Add a whole number."""
        self.parts.append(NUMBER.pack(value))

    def json(self, value: Any) -> None:
        """Add what JSON can hold."""
        data = json.dumps(value, separators=(",", ":")).encode()
        self.number(len(data))
        self.parts.append(data)

    def array(self, key: str, value: Ints) -> None:
        """Add an array of int32; its shape is not kept."""
        flat = np.ascontiguousarray(value, np.int32).reshape(-1)
        last = self.last.get(key)
        if last is not None and last.size == flat.size:
            self.number(2 * flat.size + 1)
            self.parts.append((flat - last).tobytes())
        else:
            self.number(2 * flat.size)
            self.parts.append(flat.tobytes())
        self.last[key] = flat

    def bytes(self) -> bytes:
        """All that was added."""
        return b"".join(self.parts)


class BlockReader:
    """Takes values off in the order in which they were added.

    raises: ValueError when the data ends before one
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.last: dict[str, Ints] = {}

    @property
    def ended(self) -> bool:
        """Whether everything was taken."""
        return self.at == len(self.data)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        part = self.data[self.at : self.at + count]
        if count < 0 or len(part) != count:
            raise ValueError(f"{count} bytes wanted, {len(part)} left")
        self.at += count
        return part

    def number(self) -> int:
        """The next whole number."""
        value: int = NUMBER.unpack(self.take(NUMBER.size))[0]
        return value

    def json(self) -> Any:
        """The next value that JSON held."""
        return json.loads(self.take(self.number()))

    def array(self, key: str) -> Ints:
        """The next array.   returns: [n] int32, read-only"""
        size, follows = divmod(self.number(), 2)
        value = np.frombuffer(self.take(4 * size), np.int32)
        if follows:
            last = self.last.get(key)
            if last is None or last.size != size:
                raise ValueError(f"{key} follows nothing")
            value = value + last
            value.flags.writeable = False
        self.last[key] = value
        return value
