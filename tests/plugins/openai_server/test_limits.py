"""Each limit holds at its edge and one past it, and no client holds the server up."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from served import LIMITS, Served, read_until_closed, serve

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ABORTED = r'headstock_requests_total{.*outcome="abort"}'


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server that does not wait for clients. On a busy machine every client is slow."""
    limits = ("--header-timeout", "0.5", "--body-timeout", "0.5", "--keep-alive", "1")
    with serve(*limits, key="secret", script={}) as served:
        yield served


def raw_get(*headers: str) -> bytes:
    lines = ["GET /health HTTP/1.1", "host: x", *headers, "connection: close"]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def status_of(data: bytes) -> int:
    return int(data.split(b" ", 2)[1])


def ask_raw(server: Served, data: bytes) -> bytes:
    with server.connect(data) as connection:
        return read_until_closed(connection)


@pytest.mark.feature("W10")
def test_headers_have_a_size_and_a_number(server: Served) -> None:
    # as they are counted: names, values, four bytes a line, and the path
    used = len("/health") + len("connection") + len("close") + 4 + len("hostx") + 4 + len("a") + 4
    room = LIMITS["--max-header-bytes"] - used
    assert status_of(ask_raw(server, raw_get(f"a: {'x' * int(room)}"))) == 200
    for excess in (1, 100_000):
        answer = ask_raw(server, raw_get(f"a: {'x' * int(room + excess)}"))
        assert status_of(answer) == 431
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "headers_too_large"
    most = int(LIMITS["--max-headers"])
    assert status_of(ask_raw(server, raw_get(*[f"a{i}: x" for i in range(most - 2)]))) == 200
    assert status_of(ask_raw(server, raw_get(*[f"a{i}: x" for i in range(most - 1)]))) == 431


def test_what_is_no_http_gets_an_error_with_a_body(server: Served) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03", b"GET\r\n\r\n"):
        answer = ask_raw(server, data)
        assert status_of(answer) == 400
        assert "valid HTTP" in json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n"],
    ids=["nothing", "half a line", "half the headers"],
)
def test_headers_that_do_not_come_are_not_waited_for(hasty: Served, sent: bytes) -> None:
    began = time.monotonic()
    with hasty.connect(sent) as connection:
        assert read_until_closed(connection) == b""
        assert time.monotonic() - began > 0.4


def test_a_body_that_stops_is_not_waited_for(hasty: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    head += b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    began = time.monotonic()
    with hasty.connect(head) as connection:
        assert read_until_closed(connection) == b""
        assert time.monotonic() - began > 0.4


@pytest.mark.full
def test_an_idle_connection_closes_and_a_used_one_stays(hasty: Served) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with hasty.connect(request) as connection:
        for _ in range(2):
            time.sleep(0.6)  # longer than headers may take, shorter than idleness
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.sendall(request)
        assert read_until_closed(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.feature("W10")
def test_a_body_has_a_size(server: Served) -> None:
    most = int(LIMITS["--max-body-bytes"])
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert server.post(TEXT, body + b" " * (most - len(body))).status == 200
    over = server.post(TEXT, body + b" " * (most - len(body) + 1))
    assert (over.status, over.error["code"]) == (413, "body_too_large")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    head += b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    assert status_of(ask_raw(server, head + chunks * 5)) == 413


def test_lists_have_lengths(server: Served) -> None:
    def status(path: str, **fields: object) -> int:
        return server.post(path, {"max_tokens": 1, **fields}).status

    message = {"role": "user", "content": "a"}
    assert status(TEXT, prompt=["a"] * 3) == 200
    assert status(TEXT, prompt=["a"] * 4) == 400
    assert status(TEXT, prompt="a", n=3) == 200
    assert status(TEXT, prompt="a", n=4) == 400
    assert status(TEXT, prompt="a", n=10**9) == 400
    assert status(CHAT, messages=[message] * 3) == 200
    assert status(CHAT, messages=[message] * 4) == 400


def test_what_never_fits_the_queue_is_refused_at_once(server: Served) -> None:
    most = int(LIMITS["--max-queued-tokens"])
    ids = [5] * (most // 2)
    assert server.post(TEXT, {"prompt": [ids] * 2, "max_tokens": 1}).status == 200
    over = server.post(TEXT, {"prompt": [ids, [*ids, 5]], "max_tokens": 1})
    assert (over.status, over.error["type"]) == (400, "invalid_request_error")
    assert f"prompts have {most + 1} tokens, and {most} may wait" in over.error["message"]


@pytest.mark.feature("W10")
def test_a_full_queue_is_429_and_clients_that_leave_make_room(server: Served) -> None:
    stream = {"prompt": "a", "n": 3, "max_tokens": 400, "ignore_eos": True, "stream": True}
    streams = [server.post_raw(TEXT, stream) for _ in range(4)]
    for connection in streams:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    full = server.post(TEXT, {"prompt": "a", "max_tokens": 1})
    assert (full.status, full.headers["retry-after"]) == (429, "1")
    assert full.error["code"] == "queue_full"
    assert "12 of 12 answers run or wait" in full.error["message"]
    for index, connection in enumerate(streams):
        if index % 2:  # a reset in place of an end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    server.wait_for("headstock_kv_pages_live", 0)
    server.wait_for("headstock_requests_running", 0)
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status == 200


def test_a_client_that_leaves_an_answer_it_waits_for_frees_its_pages(server: Served) -> None:
    body = {"prompt": "a", "n": 3, "max_tokens": 1500, "ignore_eos": True}
    before = server.metric(ABORTED)
    with server.post_raw(TEXT, body):
        server.wait_for("headstock_requests_running", 3)
    server.wait_for("headstock_kv_pages_live", 0)
    assert server.metric(ABORTED) == before + 3
    assert server.wait_for_line(status=499, prompt_tokens=1)["finish"] == ["abort"] * 3


@pytest.mark.feature("W10")
@pytest.mark.parametrize(
    "value",
    [None, "", "secret", "Bearer", "Bearer wrong", "Bearer secretx", "Basic secret", "Bearer é"],
)
def test_a_wrong_key_opens_nothing_but_health(server: Served, value: str | None) -> None:
    headers = {} if value is None else {"authorization": value}
    paths = ["/v1/models", "/metrics", "/version", "/tokenize", "/v1/none"]
    for path in paths if value is None else paths[:1]:
        sent = "".join(f"{name}: {each}\r\n" for name, each in headers.items())
        data = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{sent}\r\n".encode()
        answer = ask_raw(server, data)
        assert status_of(answer) == 401, path
        assert b"www-authenticate: Bearer" in answer
    assert status_of(ask_raw(server, raw_get())) == 200


def test_a_key_is_taken_once_and_in_either_spelling(server: Served) -> None:
    def status(*values: str) -> int:
        sent = "".join(f"authorization: {value}\r\n" for value in values)
        head = f"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{sent}\r\n"
        return status_of(ask_raw(server, head.encode()))

    assert status("bearer secret") == status("Bearer  secret") == 200
    assert status("Bearer secret", "Bearer secret") == 401


def test_other_content_types_are_refused(server: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.post(TEXT, {"prompt": "a"}, headers={"content-type": kind})
        assert answer.status == 415 and "application/json" in answer.error["message"]
    kind = "application/json; charset=utf-8"
    fine = server.post(TEXT, {"prompt": "a", "max_tokens": 1}, headers={"content-type": kind})
    assert fine.status == 200


def test_a_request_id_is_shown_and_never_used(server: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for _ in range(2):  # as a key, the second would collide
        answer = server.post(TEXT, body, headers={"x-request-id": "mine-1"})
        assert (answer.status, answer.headers["x-request-id"]) == (200, "mine-1")
    odd = server.post(TEXT, body, headers={"x-request-id": "x" * 129})
    assert len(odd.headers["x-request-id"]) == 32
    line = server.wait_for_line(id="mine-1")
    assert line["completion_tokens"] == 1 and line["finish"] == ["length"]
    assert line["status"] == 200 and line["ttft_ms"] <= line["ms"]
