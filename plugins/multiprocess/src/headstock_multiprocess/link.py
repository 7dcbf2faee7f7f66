"""A connection between two ranks."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from headstock_multiprocess.messages import Message

_Received = TypeVar("_Received")

_HEADER = struct.Struct(">I")
_BUFFER_BYTES = 1 << 16
_MOST_BYTES = 1 << 30
"""Of a frame; a longer length means that the stream is desynchronised."""


class Link(Generic[_Received]):
    """A socket on which any thread may send messages, and one thread receives them.

    kind: the type of the messages that arrive
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.socket = sock
        self._arrived = bytearray()
        self._lock = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[_Received] = msgspec.msgpack.Decoder(kind)

    def send(self, message: Message) -> None:
        """Send a message; it waits while the other end does not read.   raises: OSError"""
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, content: bytes) -> None:
        """Send a message that is encoded.   raises: OSError"""
        with self._lock:
            self.socket.sendall(_HEADER.pack(len(content)) + content)

    def receive(self) -> _Received | None:
        """Return the next message; None at the end of the stream.

        raises: OSError; msgspec.MsgspecError, ValueError for bytes that are no message
        """
        header = self._read(_HEADER.size)
        if header is None:
            return None
        (length,) = _HEADER.unpack(header)
        if length > _MOST_BYTES:
            raise ValueError(f"a frame of {length} bytes; at most {_MOST_BYTES} are valid")
        content = self._read(length)
        return None if content is None else self._decoder.decode(content)

    def _read(self, size: int) -> bytes | None:
        """Read as many bytes; None where the stream ends before.   raises: OSError"""
        # One call of the system reads a whole message as a rule, or several.
        while len(self._arrived) < size:
            data = self.socket.recv(_BUFFER_BYTES)
            if not data:
                return None
            self._arrived += data
        content = bytes(self._arrived[:size])
        del self._arrived[:size]
        return content

    def describe_peer(self) -> str:
        """The address of the other end."""
        host, port, *_ = self.socket.getpeername()
        return f"{host}:{port}"

    def close(self) -> None:
        """End the stream in both directions, which ends a `receive` of either end."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end has gone
        finally:
            self.socket.close()
