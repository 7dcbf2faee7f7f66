"""The engine's end of the socket between a server and its engine process."""

from __future__ import annotations

import socket
import threading

from headstock_openai_server.engine.messages import Message, MessageReader, ToEngine, encode_frame

CHUNK = 1 << 16
"""How many bytes are read at a time."""


class Channel:
    """A socket on which any thread may send messages and one thread receives them."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.lock = threading.Lock()
        self.reader: MessageReader[ToEngine] = MessageReader(ToEngine)
        self.messages: list[ToEngine] = []

    def send(self, message: Message) -> None:
        """Send a message; it waits while the other end does not read.   raises: OSError"""
        frame = encode_frame(message)
        with self.lock:
            self.socket.sendall(frame)

    def receive(self) -> ToEngine | None:
        """The next message; None at the end of the stream.   raises: OSError"""
        while not self.messages:
            # One call, which releases the GIL once: to get it back from the engine's
            # thread may take most of a step.
            data = self.socket.recv(CHUNK)
            if not data:
                return None
            self.messages = list(self.reader.feed(data))
        return self.messages.pop(0)
