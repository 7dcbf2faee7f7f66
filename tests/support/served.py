"""Servers as processes, and a plain HTTP client for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

import headstock_demo

SUPPORT = Path(__file__).parent
CHECKPOINT = Path(headstock_demo.__file__).parent / "checkpoint"
"""Of the demo model."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""The environment of clients that would ask a hub."""
COMMAND = (
    "import sys; from headstock.cli.process import handle_signals\n"
    "from headstock.errors import HeadstockError\n"
    "from headstock_openai_server.command import main\n"
    "with handle_signals():\n"
    "    try:\n"
    "        code = main(sys.argv[2:], sys.argv[1] or None)\n"
    "    except HeadstockError as error:\n"
    "        print(error, file=sys.stderr)\n"
    "        code = error.exit_code\n"
    "sys.exit(code)"
)
"""What `headstock serve` does, with an engine of one's choice."""


LIMITS = {
    "--max-body-bytes": 4000,
    "--max-header-bytes": 2000,
    "--max-headers": 12,
    "--max-prompts": 3,
    "--max-messages": 3,
    "--max-n": 3,
    "--max-running-requests": 4,
    "--max-queued-requests": 8,
    "--max-queued-tokens": 300,
}
"""Small limits, of the server that most tests share."""


@frozen
class Answer:
    """A response: its status, its headers in lower case, its body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error that the body must be."""
        assert self.json.keys() == {"error"}, self.body
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], blocks[-3:]
        return [json.loads(each.removeprefix("data: ")) for each in blocks[:-2] if each[0] != ":"]

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """The events of a response, each of which has its name before it and a number in it."""
        events = self.typed_events
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        return events

    @property
    def typed_events(self) -> list[dict[str, Any]]:
        """The events of a stream in which each has its type before it."""
        *blocks, rest = self.body.decode().split("\n\n")
        assert rest == "", rest
        events = []
        for name, data in (each.split("\n") for each in blocks if each[0] != ":"):
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


@define
class Served:
    """A server process."""

    process: subprocess.Popen[str]
    port: int
    key: str | None
    errors: list[str] = field(factory=list)
    log: list[dict[str, Any]] = field(factory=list)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Answer:
        """The response to one request; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = dict({"authorization": f"Bearer {self.key}"} if self.key else {})
        if body is not None:
            sent["content-type"] = "application/json"
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, body, sent | dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **options: Any) -> Answer:
        """The response to a POST."""
        return self.ask("POST", path, body, **options)

    def get(self, path: str, **options: Any) -> Answer:
        """The response to a GET."""
        return self.ask("GET", path, **options)

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A raw connection on which `sent` has been sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=600)
        connection.sendall(sent)
        return connection

    def post_raw(self, path: str, body: Any) -> socket.socket:
        """A raw connection on which a POST has been sent."""
        data = json.dumps(body).encode()
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"{key}connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return self.connect(head.encode() + data)

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.get("/metrics").body.decode()
        values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, name
        return sum(map(float, values))

    def wait_for(self, name: str, value: float, seconds: float = 600) -> None:
        """Wait until a metric has this value."""
        end = time.monotonic() + seconds
        while (found := self.metric(name)) != value:
            assert time.monotonic() < end, f"{name} is {found} after {seconds} s, not {value}"
            time.sleep(0.02)

    def wait_for_line(self, **facts: Any) -> dict[str, Any]:
        """The first line of the access log with these facts; waits for it."""
        end = time.monotonic() + 600
        while True:
            for line in list(self.log):
                if facts.items() <= line.items():
                    return line
            assert time.monotonic() < end, f"no line with {facts}"
            time.sleep(0.02)

    def wait_for_error(self, end: str) -> str:
        """The first line on standard error that ends so; waits for it."""
        stop = time.monotonic() + 600
        while True:
            for line in list(self.errors):
                if line.endswith(end):
                    return line
            assert time.monotonic() < stop, f"no line ends with {end!r}"
            time.sleep(0.02)

    def wait(self, seconds: float = 600) -> int:
        """The exit code."""
        return self.process.wait(seconds)


def read_until_closed(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(1 << 16):
            data += chunk
    return data


def split_events(data: bytes) -> list[dict[str, Any]]:
    """The events of a raw response in chunks, which must be whole."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return Answer(200, {}, body).events


def find_engine(server: Served) -> int:
    """The id of the engine process."""
    with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as file:
        (engine,) = map(int, file.read().split())
    return engine


@contextlib.contextmanager
def serve(
    *arguments: str,
    key: str | None = None,
    script: Mapping[str, Any] | None = None,
    faults: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    wait_ready: bool = True,
) -> Iterator[Served]:
    """A server with these flags, ready unless told otherwise; with `script`, on a scripted engine,
    with `faults`, on an engine in which they happen.

    It is killed at the end if it still runs.
    """
    module = "faulty_engine" if faults else "" if script is None else "scripted_engine"
    told = {"SCRIPT": json.dumps(script or {}), "FAULTS": " ".join(faults)}
    env = {**os.environ, **told, **(environment or {})}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SUPPORT), env.get("PYTHONPATH"))))
    keys = () if key is None else ("--api-key", key)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, module, "--port", "0", *keys, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert process.stderr is not None and process.stdout is not None
    served = Served(process, 0, key)
    listening, ready = threading.Event(), threading.Event()

    def read_errors() -> None:
        for line in process.stderr:
            served.errors.append(line)
            match = re.match(r"loading .*; http://\S+:(\d+)/health", line)
            if match:
                served.port = int(match[1])
                listening.set()
            if line.startswith("ready: "):
                ready.set()
        listening.set()
        ready.set()

    def read_log() -> None:
        for line in process.stdout:
            served.log.append(json.loads(line))

    threads = [threading.Thread(target=each, daemon=True) for each in (read_errors, read_log)]
    for thread in threads:
        thread.start()
    try:
        assert listening.wait(600)
        if wait_ready:
            assert ready.wait(600)
            assert process.poll() is None, "".join(served.errors)
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for thread in threads:
            thread.join()
        process.stderr.close()
        process.stdout.close()
