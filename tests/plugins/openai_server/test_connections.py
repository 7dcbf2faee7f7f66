"""What clients send beside requests, and clients that do not read: over raw connections."""

from __future__ import annotations

import json
import socket
import time

import pytest
from served import LIMITS, Served, read_until_closed, serve

TEXT = "/v1/completions"
BODY = json.dumps({"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0}).encode()
MOST = int(LIMITS["--max-header-bytes"])


def head(*lines: str, length: int | None = None) -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = (
        "host: x",
        "authorization: Bearer secret",
        "content-type: application/json",
        size,
        *lines,
    )
    return "\r\n".join((f"POST {TEXT} HTTP/1.1", *lines, "\r\n")).encode()


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


def ask(server: Served, *parts: bytes) -> bytes:
    """What comes back when the parts are sent one by one, as far as they are taken."""
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.02)
        except ConnectionError:
            pass
        return read_until_closed(connection)


def list_statuses(data: bytes) -> list[int]:
    return [int(each[:3]) for each in data.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.feature("W10")
@pytest.mark.parametrize(
    "between",
    [
        b"0\r\n" + b"".join(b"a%d: x\r\n" % i for i in range(400)),
        b"0\r\na: " + b"x" * 2 * MOST,
        b"1;" + b"x" * 2 * MOST,
    ],
    ids=["fields behind the body", "a long field", "a long extension of a chunk"],
)
def test_what_is_no_body_has_the_size_of_headers(server: Served, between: bytes) -> None:
    first, second = between[: len(between) // 2], between[len(between) // 2 :]
    answer = ask(server, head(), chunk(BODY), first, second, b"x" * MOST)
    assert list_statuses(answer) == [431] and b"headers_too_large" in answer
    fine = chunk(BODY[:9], b";a=b") + chunk(BODY[9:]) + b"0\r\na: x\r\n\r\n"
    assert list_statuses(ask(server, head("connection: close") + fine)) == [200]


def test_a_field_behind_the_body_is_no_header(server: Served) -> None:
    sent = head("connection: close") + chunk(BODY) + b"0\r\nx-request-id: late\r\n\r\n"
    answer = ask(server, sent)
    assert list_statuses(answer) == [200] and b"late" not in answer


WISH = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAo")
"""What Java's client sends with every request, unless it is told that this is no HTTP/2 server."""


@pytest.mark.feature("W1")
@pytest.mark.parametrize(
    "parts",
    [
        [head(*WISH, length=len(BODY)) + BODY],
        [head(*WISH, length=len(BODY)), BODY[:5], BODY[5:]],
        [head(*WISH)[:90], head(*WISH)[90:] + chunk(BODY)[:20], chunk(BODY)[20:] + b"0\r\n\r\n"],
    ],
    ids=["whole", "in pieces", "in chunks"],
)
def test_a_wish_for_another_protocol_is_ignored(server: Served, parts: list[bytes]) -> None:
    last = head("connection: close", length=len(BODY)) + BODY
    answer = ask(server, *parts, *parts, last)
    assert list_statuses(answer) == [200, 200, 200]
    assert answer.count(b'"text":" 42') == 3


def test_a_wish_for_a_tunnel_is_refused(server: Served) -> None:
    assert list_statuses(ask(server, b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n")) == [400]


@pytest.mark.feature("W10")
@pytest.mark.full
def test_a_client_that_does_not_read_a_whole_answer_is_dropped() -> None:
    with serve(
        "--unread-timeout", "0.5", "--allowed-hosts", "x", script={"interval": 0.001}
    ) as server:
        (token,) = server.post("/tokenize", {"prompt": " there"}).json["tokens"]
        data = json.dumps({"tokens": [token] * 2_000_000}).encode()  # 12 MB: sockets hold less
        request = head("connection: close", length=len(data)).replace(TEXT.encode(), b"/detokenize")
        received = []
        for pause in (3.0, 0.01):
            with socket.socket() as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                reader.connect(("127.0.0.1", server.port))
                reader.sendall(request + data)
                size = 0
                while got := len(reader.recv(1 << 20)):
                    size += got
                    time.sleep(pause if size == got else 0.01)
            received.append(size)
    deaf, slow = received
    assert slow > 12_000_000 > deaf
