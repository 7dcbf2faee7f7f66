"""Ranks that something else has started: they find rank 0 by the variables of torchrun, and prove
that they know a secret.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping

from attrs import frozen

from headstock.errors import CannotRun, UsageError, shorten

SECRET = "HEADSTOCK_RANK_SECRET"
"""The variable with the text that all ranks know."""

_NONCE_BYTES = 32
_INDEX = struct.Struct(">I")
_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 0.3
_CHECK_SECONDS = 0.5
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@frozen
class Placement:
    """Which rank this process is, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

    port: where rank 0 listens for the others
    """

    index: int
    count: int
    address: str
    port: int
    secret: bytes


def read_placement(variables: Mapping[str, str], count: int) -> Placement | None:
    """Read which rank this process is; None where nothing has started ranks.

    count: of the configuration
    raises: UsageError
    """
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    index, size, port = (
        _read_number(variables, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if size == 1:
        return None
    if size != count:
        raise UsageError(
            f"tp (--tp): expected {size}, as WORLD_SIZE has it, got {count}; start as many ranks "
            "as tp says"
        )
    address = variables.get("MASTER_ADDR", "")
    if not address or index >= size or port > 65_534:
        raise UsageError(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: expected a rank below the size, an "
            f"address and a port up to 65534, got {index}, {size}, {shorten(address)!r} and {port}"
        )
    secret = variables.get(SECRET, "")
    if not secret and address not in _LOOPBACK:
        raise UsageError(
            f"{SECRET}: expected the same long random text on all ranks, because rank 0 listens on "
            f"{shorten(address)}, got none"
        )
    # What starts ranks may listen on MASTER_PORT itself, as torchrun does.
    return Placement(index, size, address, port + 1, secret.encode())


def _read_number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name}: expected a number, as torchrun sets it, got {shorten(text)!r}")
    return int(text)


def open_listener(place: Placement) -> socket.socket:
    """Listen for the other ranks on rank 0; port 0 takes a free one.   raises: CannotRun"""
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    host = place.address if place.address in _LOOPBACK else ""
    try:
        return socket.create_server((host, place.port), family=family)
    except OSError as error:
        raise CannotRun(
            f"rank 0 cannot listen on port {place.port}, MASTER_PORT + 1: {error.strerror}; choose "
            "another MASTER_PORT"
        ) from error


def accept_ranks(
    listener: socket.socket,
    place: Placement,
    patience: float,
    check_ranks: Callable[[], None] = lambda: None,
) -> dict[int, socket.socket]:
    """Wait on rank 0 until all other ranks have connected; return their sockets by index.

    Whoever does not know the secret is sent away.
    check_ranks: called now and then; it raises once a rank cannot come
    raises: CannotRun when a rank is missing after `patience` seconds; what `check_ranks` raises
    """
    deadline = time.monotonic() + patience
    found: dict[int, socket.socket] = {}
    try:
        while len(found) < place.count - 1:
            check_ranks()
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [str(each) for each in range(1, place.count) if each not in found]
                raise CannotRun(
                    f"rank {', '.join(missing)} of {place.count} did not connect within "
                    f"{patience:g} s; start it, and check MASTER_ADDR and MASTER_PORT there"
                )
            listener.settimeout(min(_CHECK_SECONDS, left))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            index = _check_rank(connection, place)
            if index is None or index in found:
                connection.close()
            else:
                found[index] = connection
    except BaseException:
        for each in found.values():
            each.close()
        raise
    return found


def _check_rank(connection: socket.socket, place: Placement) -> int | None:
    """Return which rank has connected; None for whoever does not know the secret."""
    connection.settimeout(_HANDSHAKE_SECONDS)
    ours = secrets.token_bytes(_NONCE_BYTES)
    try:
        connection.sendall(ours)
        answer = _read(connection, _INDEX.size + 2 * _NONCE_BYTES)
        index, theirs, proof = (
            answer[: _INDEX.size],
            answer[_INDEX.size : -_NONCE_BYTES],
            answer[-_NONCE_BYTES:],
        )
        if not hmac.compare_digest(proof, _prove(place, b"rank", ours, index, theirs)):
            return None
        connection.sendall(_prove(place, b"rank 0", ours, index, theirs))
    except OSError:
        return None
    connection.settimeout(None)
    (number,) = _INDEX.unpack(index)
    return int(number) if 0 < number < place.count else None


def connect_to_leader(place: Placement, patience: float) -> socket.socket:
    """Connect another rank to rank 0, which may have still to start.

    raises: CannotRun
    """
    deadline = time.monotonic() + patience
    reason = "nothing listens there"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((place.address, place.port), _HANDSHAKE_SECONDS)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        try:
            ours = _read(connection, _NONCE_BYTES)
            index, theirs = _INDEX.pack(place.index), secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(index + theirs + _prove(place, b"rank", ours, index, theirs))
            proof = _read(connection, _NONCE_BYTES)
        except OSError:
            connection.close()
            raise CannotRun(
                f"rank 0 at {place.address}:{place.port} sent rank {place.index} away; set "
                f"{SECRET} to the same text on all ranks, and RANK to a number of its own"
            ) from None
        if not hmac.compare_digest(proof, _prove(place, b"rank 0", ours, index, theirs)):
            connection.close()
            raise CannotRun(
                f"what listens at {place.address}:{place.port} does not know {SECRET}; check "
                "MASTER_ADDR and MASTER_PORT"
            )
        connection.settimeout(None)
        return connection
    raise CannotRun(
        f"rank {place.index} cannot reach rank 0 at {place.address}:{place.port}: {reason}; start "
        "rank 0, and check MASTER_ADDR and MASTER_PORT"
    )


def _prove(place: Placement, role: bytes, *parts: bytes) -> bytes:
    """What shows that one knows the secret, and what one is."""
    return hmac.digest(place.secret or os.fsencode("local"), b"".join((role, *parts)), "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    """Read as many bytes.   raises: ConnectionResetError where the stream ends before, OSError"""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the stream ended")
        data += more
    return data
