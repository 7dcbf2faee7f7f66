"""Who may call a server: by which names, from which pages, through which sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from ipaddress import IPv6Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from served import Served, read_until_closed

from headstock import EngineConfig, UsageError
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.callers import HostCheck
from headstock_openai_server.observe.access_log import AccessLog
from headstock_openai_server.routes.app import make_app
from headstock_openai_server.server import ServerProcess, listen
from headstock_openai_server.settings import ServerSettings

TEXT = "/v1/completions"
PAGE = {"origin": "https://app.example"}
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z][a-z0-9-]{0,8}){0,3}", fullmatch=True)
PORTS = st.sampled_from(["", ":80", ":65535"])


@given(st.ip_addresses(), PORTS)
def test_a_server_is_called_by_any_numeric_address(address: Any, port: str) -> None:
    host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
    assert HostCheck([]).allows(f"{host}{port}".encode())


@given(NAMES, st.lists(NAMES, max_size=3), PORTS)
def test_a_server_is_called_by_names_only_if_they_are_its_own(
    name: str, names: list[str], port: str
) -> None:
    own = name == "localhost" or name.endswith(".localhost")
    assert HostCheck(names).allows(f"{name}{port}".encode()) is (own or name in names)
    assert HostCheck([*names, name.upper()]).allows(f"{name.title()}.{port}".encode())
    assert HostCheck([f".{name}"]).allows(f"a.{name}{port}".encode())
    assert not HostCheck([f".{name}", "b"]).allows(f"a{name}.example{port}".encode())


@pytest.mark.parametrize("host", [b"", b"[", b"1.2.3", b"1.2.3.4.evil.example", b"\xff", b"::1"])
def test_what_only_looks_like_an_address_is_none(host: bytes) -> None:
    assert not HostCheck([]).allows(host)


def ask_app(settings: ServerSettings, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    """Status and body of a GET, without an engine."""
    app = make_app(Service(EngineConfig(model="demo"), settings, {}), AccessLog("off"))
    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({**scope, "query_string": b""}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


EVIL = (b"host", b"evil.example:8000")


@pytest.mark.feature("W19")
@pytest.mark.parametrize(
    ("settings", "path", "status"),
    [
        ({}, "/version", 403),
        ({}, "/", 403),
        ({}, "/health", 503),  # the model is not loaded
        ({"allowed_hosts": ("evil.example",)}, "/version", 200),
        ({"host": "evil.example"}, "/version", 200),
        ({"uds": "/tmp/x"}, "/version", 200),
        ({"api_keys": ("k",)}, "/version", 401),
    ],
)
def test_a_page_that_points_its_own_name_at_a_server_without_a_key_is_refused(
    settings: dict[str, Any], path: str, status: int
) -> None:
    found, body = ask_app(ServerSettings(model_names=("demo",), **settings), path, EVIL)
    assert found == status
    if status == 403:
        assert body["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts evil.example" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/abort_request", "/reset_prefix_cache", "/flush_cache"])
def test_administration_needs_a_key(path: str) -> None:
    found, body = ask_app(ServerSettings(model_names=("demo",)), path, (b"host", b"localhost"))
    assert (found, body["error"]["message"]) == (404, f"there is nothing at {path}")


@pytest.mark.feature("W19")
def test_browsers_learn_without_a_key_which_pages_may_call(server: Served) -> None:
    bare = {"authorization": ""}
    asked = server.ask("OPTIONS", TEXT, headers=bare | PAGE | ASKS)
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization"
    other = server.ask("OPTIONS", TEXT, headers={**bare, **ASKS, "origin": "https://evil.example"})
    assert other.status == 400 and "access-control-allow-origin" not in other.headers
    plain = server.ask("OPTIONS", TEXT, headers=PAGE)
    assert plain.status == 405


@pytest.mark.parametrize("stream", [False, True])
def test_pages_read_what_they_are_answered_and_why_they_are_refused(
    server: Served, stream: bool
) -> None:
    body = {"prompt": "12 + 30 =", "max_tokens": 2, "stream": stream}
    for headers, status in ((PAGE, 200), ({**PAGE, "authorization": "Bearer no"}, 401)):
        answer = server.post(TEXT, body, headers=headers)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    foreign = server.post(TEXT, body, headers={"origin": "https://evil.example"})
    assert foreign.status == 200 and "access-control-allow-origin" not in foreign.headers


def test_a_proxy_may_leave_its_path_or_take_it_away(server: Served) -> None:
    for path in ("/v1/models", "/llm/v1/models"):
        assert server.get(path).json["data"][0]["id"] == "demo"
    for path in ("/llm", "/llm/"):
        assert b"<title>" in server.get(path, headers={"authorization": ""}).body
    assert server.get("/llm2/v1/models").status == 404
    assert server.get("/llm/v1/models", headers={"authorization": ""}).status == 401


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /health HTTP/1.1"], 400),
        (["GET /health HTTP/1.1", "host: a", "host: a"], 400),
        (["GET /health HTTP/1.1", "host: a", "connection: close"], 200),
        (["GET /health HTTP/1.0"], 200),
    ],
)
def test_a_request_has_one_host(server: Served, lines: list[str], status: int) -> None:
    with server.connect("\r\n".join([*lines, "\r\n"]).encode()) as connection:
        data = read_until_closed(connection)
    assert data.startswith(b"HTTP/1.1 %d" % status), data


@pytest.mark.feature("W19")
def test_a_stream_is_aborted_by_the_id_of_its_chunks_and_by_that_of_the_live_view(
    server: Served,
) -> None:
    for of_chunks in (True, False):
        with server.post_raw(TEXT, LONG) as connection:
            file = connection.makefile("rb")
            first = next(line for line in file if line.startswith(b"data: "))
            shown = json.loads(first.removeprefix(b"data: "))["id"]
            answer = server.post("/abort_request", {"rid": shown if of_chunks else "none"})
            while not of_chunks and answer.status == 404:
                # The view may still be an older one.
                lanes = server.get("/live").json["running"]
                shown = lanes[0]["id"] if lanes else "none"
                answer = server.post("/abort_request", {"rid": shown})
            assert (answer.status, answer.json) == (200, {"aborted": 1})
            *_, last, done = [line for line in file if line.startswith(b"data: ")]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "aborted"
        assert done == b"data: [DONE]\n"
    assert server.post("/abort_request", {"rid": shown}).status == 404
    server.wait_for("headstock_requests_running", 0)


def test_an_empty_id_is_that_of_no_request() -> None:
    whole = SimpleNamespace(answer_id="", choices={"5": None}, stop=pytest.fail)
    service: Any = SimpleNamespace(generations=[whole])
    assert Service.abort(service, "") == 0


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_nothing_is_found_in_a_prefix_cache_that_was_emptied(server: Served, path: str) -> None:
    body = {"prompt": "one two three four five six seven " * 4, "max_tokens": 1}

    def count_cached() -> int:
        usage = server.post(TEXT, body).json["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    count_cached()
    assert count_cached() > 0
    assert server.post(path, {}).json == {"status": "ok"}
    assert count_cached() == 0


def test_an_echo_of_the_prompt_alone_counts_no_token(server: Served) -> None:
    names = [f"headstock_request_{kind}output_tokens_sum" for kind in ("", "longest_")]
    before = [server.metric(name) for name in names]
    body = {"prompt": "12 + 30 =", "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = server.post(TEXT, body, headers={"x-request-id": "echo"})
    assert answer.json["usage"]["completion_tokens"] == 0
    assert server.wait_for_line(id="echo")["completion_tokens"] == 0
    assert [server.metric(name) for name in names] == before


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """The server's HTTP side, without an engine, on a thread."""
    listener = listen(settings)
    loop, started = asyncio.new_event_loop(), threading.Event()
    stop: list[Any] = []

    async def serve() -> None:
        service = Service(EngineConfig(model="demo"), settings, {})
        server = ServerProcess(service, AccessLog("off"), listener).http
        stop.append(lambda: setattr(server, "should_exit", True))
        task = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        started.set()
        await task

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(600)
        yield listener
    finally:
        stop[0]()
        thread.join()
        loop.close()
        listener.close()


def ask_health(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/health")
    status: str = json.loads(connection.getresponse().read())["status"]
    connection.close()
    return status


@pytest.mark.feature("W19")
def test_a_unix_socket_serves_and_replaces_only_one_that_nobody_listens_on(tmp_path: Path) -> None:
    path = str(tmp_path / "h.sock")
    settings = ServerSettings(model_names=("demo",), uds=path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with listening(settings):
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(path)
            connection = http.client.HTTPConnection("any.name")
            connection.sock = connected
            assert ask_health(connection) == "loading"
        with pytest.raises(UsageError, match="give another --uds"):
            listen(settings)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="give another --uds"):
        listen(ServerSettings(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.feature("W19")
def test_https_shows_the_certificate_and_asks_clients_for_theirs(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "server.pem"
    )
    settings = ServerSettings(
        port=0,
        model_names=("demo",),
        ssl_certfile=str(tmp_path / "server.pem"),
        ssl_ca_certs=str(tmp_path / "ca.pem"),
    )
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with listening(settings) as listener:
        port = listener.getsockname()[1]

        def ask() -> str:
            connection = http.client.HTTPSConnection("127.0.0.1", port, context=context)
            return ask_health(connection)

        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask()
        authority.issue_cert("a-client").configure_cert(context)
        assert ask() == "loading"


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_files_that_are_no_certificates_are_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "server.pem"
    if text is not None:
        path.write_text(text)
    settings = ServerSettings(model_names=("demo",), ssl_certfile=str(path))
    service = Service(EngineConfig(model="demo"), settings, {})
    with socket.socket() as listener, pytest.raises(UsageError, match=r"server\.pem for https"):
        ServerProcess(service, AccessLog("off"), listener)
