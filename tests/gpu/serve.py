"""What a server adds: the workload `online` at a socket, beside the engine in this process.

    PYTHONPATH=tests:tests/support python -m gpu.serve [--rates 16,40] [--count 200] [--turns 2]
    PYTHONPATH=tests:tests/support python -m gpu.serve --device cpu --model demo --rates 2 --count 8
    ... --also "vllm=vllm serve {model} --load-format dummy --port {port} --max-model-len 4096"

    ... --attn fa --also ...

The contestants take turns. The same client sends to each server: several processes on httpx, each
with every fourth request. They make their requests before the first is due, note when each event
comes, and read the events when the last has come. Wanted: times to the first token and between
tokens at most 1.1 times those of the engine in process, in the median. Two contestants are not
judged: what `--also` starts, and `client`, a server that answers at once and so tells what of a
first token is the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from attrs import asdict

from headstock import LLM, SamplingParams
from headstock.llm import get_session
from headstock_bench.latency import PERCENTILES, Latency, StreamTimes, summarize_streams
from headstock_bench.latency_workloads import LatencyWorkload, draw_latency_workload
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.streams import stream_requests

SHAPE = "qwen3-0.6b"
MOST = 1.1
"""The median time at the socket over that in process, at most."""
JUDGED = ("ttft_p50_ms", "itl_p50_ms")
NUM_CLIENTS = 4
LEAD_SECONDS = 0.5
"""Between the moment when all clients are ready and the first request's earliest."""
START_SECONDS = 400
SETTINGS = {"max_seq_len": 2048, "num_pages": 8192, "page_size": 64}


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """The figures at 16 and 40 requests a second, as `run.py` wants them.

    `GPU_SERVE` in the environment has further words, as after `python -m gpu.serve`.
    """
    for build in builds:
        build.wait()
    return measure(parse_words(shlex.split(os.environ.get("GPU_SERVE", ""))))


def parse_words(words: list[str]) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="16,40", help="requests a second, by commas")
    parser.add_argument("--count", type=int, default=200, help="requests of a run")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attn", default="auto", help="attention backends of the engine")
    parser.add_argument("--model", help="in place of the 0.6B shape with random weights")
    parser.add_argument("--also", action="append", default=[], help="NAME=COMMAND of a server")
    return parser.parse_args(words)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Latencies by rate, contestant and turn, and the ratios that are judged."""
    with tempfile.TemporaryDirectory() as folder:
        model, settings = asked.model or folder, dict(SETTINGS)
        if asked.model is None:
            write_model_directory(MODEL_SHAPES[SHAPE], Path(folder))
            settings["load_format"] = "dummy"
        if asked.device == "cpu":
            settings |= {"page_size": 16, "num_pages": 1024}
        settings |= {"device": asked.device, "attn": asked.attn}
        settings["defer_graphs"] = "off"
        workloads = {
            rate: draw_latency_workload(f"online:{rate}:{asked.count}")
            for rate in asked.rates.split(",")
        }
        commands = {"socket": make_command(model, settings), "client": BARE_COMMAND}
        commands |= dict(text.split("=", 1) for text in asked.also)
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {rate: {} for rate in workloads}
        for _ in range(asked.turns):
            for name, latencies in [
                ("process", run_in_process(model, settings, workloads)),
                *((name, run_server(text, model, workloads)) for name, text in commands.items()),
            ]:
                for rate, latency in latencies.items():
                    runs[rate].setdefault(name, []).append(asdict(latency))
                    sys.stderr.write(f"online:{rate} {name}: {latency}\n")
    ratios = {rate: divide(found["socket"], found["process"]) for rate, found in runs.items()}
    wanted = [ratio[name] <= MOST for ratio in ratios.values() for name in JUDGED]
    errors = [each["error"] for of in runs.values() for turns in of.values() for each in turns]
    return {"ok": all(wanted) and not any(errors), "ratios": ratios, "runs": runs}


def divide(at_socket: list[dict[str, Any]], in_process: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the turns, at the socket over in process."""
    return {
        name: round(
            median(each[name] for each in at_socket) / median(each[name] for each in in_process), 3
        )
        for name in PERCENTILES
    }


def run_in_process(
    model: str, settings: dict[str, Any], workloads: dict[str, LatencyWorkload]
) -> dict[str, Latency]:
    """The latencies of the engine in this process, by rate."""
    found = {}
    with LLM(model, **settings) as llm:
        for rate, workload in workloads.items():
            fitted = workload.fit_vocab(MAX_ID)
            for part in (fitted.warm_up, fitted):
                assert isinstance(part, LatencyWorkload)
                get_session(llm).loop.reset_prefix_cache()
                params = [
                    SamplingParams(**make_params(part, index)) for index in range(len(part.prompts))
                ]
                streams, _ = stream_requests(llm, part, params)
            found[rate] = summarize_streams(streams)
    return found


MAX_ID = 700
"""Ids of prompts, which every vocabulary has, the demo model's too."""


def make_params(workload: LatencyWorkload, index: int) -> dict[str, Any]:
    """The sampling of a request, in Python and over HTTP alike."""
    return {
        "max_tokens": workload.outputs[index],
        "temperature": workload.temperature,
        "seed": workload.seed + index,
        "ignore_eos": True,
    }


def make_command(model: str, settings: dict[str, Any]) -> str:
    """The command of headstock's server, with the same engine."""
    flags = [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    words = [sys.executable, "-m", "headstock", "serve", "--model", model, "--quiet", *flags]
    return shlex.join([*words, "--access-log", "off", "--port"]) + " {port}"


@contextmanager
def start_server(command: str, model: str) -> Iterator[int]:
    """The port of a server that is ready; it ends with the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [
        word.replace("{model}", model).replace("{port}", str(port)) for word in shlex.split(command)
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + START_SECONDS
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{words[0]} is not ready: exit code {process.returncode}")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_ready(port: int) -> bool:
    """Whether `/health` is 200."""
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success)
    except httpx.HTTPError:
        return False


def run_server(
    command: str, model: str, workloads: dict[str, LatencyWorkload]
) -> dict[str, Latency]:
    """The latencies at the socket of a server, by rate."""
    found = {}
    with start_server(command, model) as port:
        names = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).json()["data"]
        for rate, workload in workloads.items():
            fitted = workload.fit_vocab(MAX_ID)
            for name, part in (("warm-up", fitted.warm_up), ("run", fitted)):
                assert isinstance(part, LatencyWorkload)
                # Prompts are the same at every rate, and may not be found in the index.
                salt = f"{name} at {rate}"
                streams = send_requests(part, port, {"model": names[0]["id"], "cache_salt": salt})
            found[rate] = summarize_streams(streams)
    return found


def send_requests(
    workload: LatencyWorkload, port: int, fields: dict[str, str]
) -> list[StreamTimes]:
    """What the callers of a workload's requests see, from several processes."""
    assert workload.arrivals is not None
    url = f"http://127.0.0.1:{port}/v1/completions"
    requests = [
        {
            "at": at,
            "url": url,
            "body": {
                "prompt": list(prompt),
                "stream": True,
                **fields,
                **make_params(workload, index),
            },
        }
        for index, (at, prompt) in enumerate(zip(workload.arrivals, workload.prompts, strict=True))
    ]
    shares = [requests[first::NUM_CLIENTS] for first in range(NUM_CLIENTS)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for share in shares
        if share
    ]
    for process, share in zip(processes, shares, strict=False):
        assert process.stdin is not None
        process.stdin.write(json.dumps(share).encode() + b"\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == READY
    start = time.perf_counter() + LEAD_SECONDS
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{start}\n".encode())
        process.stdin.close()
    streams = []
    for process in processes:
        assert process.stdout is not None
        with process.stdout as output:
            streams += [StreamTimes(**each) for each in json.loads(output.read())]
        process.wait()
    return streams


READY = b"ready\n"
"""What a client says before it is told when to begin, in seconds of `time.perf_counter`."""

Pieces = list[tuple[float, bytes]]
"""What came of a response, and when."""


def follow_requests(share: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send each request when it is due, and note what comes; the fields of `StreamTimes`."""
    # Threads: for a first event, httpx's asynchronous client takes 0.6 ms and this one 0.4.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with (
        httpx.Client(timeout=300, limits=limits) as client,
        ThreadPoolExecutor(len(share)) as threads,
    ):
        # The first request of a process imports half of httpx's back end: 25 to 40 ms, which would
        # be the slowest first token of each client.
        client.get(httpx.URL(share[0]["url"]).join("/health"))
        requests = [
            client.build_request("POST", request["url"], json=request["body"]) for request in share
        ]
        sys.stdout.write(READY.decode())
        sys.stdout.flush()
        start = float(sys.stdin.readline())
        arrivals = [start + request["at"] for request in share]
        found = list(threads.map(partial(follow_request, client), requests, arrivals))
    return [read_events(*each) for each in found]


def follow_request(
    client: httpx.Client, request: httpx.Request, arrival: float
) -> tuple[float, Pieces, str | None]:
    """The arrival of a request, what came of its response, and why that was not all."""
    time.sleep(max(0.0, arrival - time.perf_counter()))
    pieces: Pieces = []
    try:
        response = client.send(request, stream=True)
        for data in response.iter_raw():
            pieces.append((time.perf_counter(), data))
    except httpx.HTTPError as caught:
        return arrival, pieces, repr(caught)
    return arrival, pieces, None if response.is_success else f"status {response.status_code}"


def read_events(arrival: float, pieces: Pieces, error: str | None) -> dict[str, Any]:
    """What the caller of one request saw; the fields of `StreamTimes`."""
    # Not while they come: it would make later ones seem late.
    times, buffer = [], b""
    for moment, data in pieces:
        *events, buffer = (buffer + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            chunk = json.loads(event[6:])
            if "error" in chunk:
                error = str(chunk["error"])
            elif chunk["choices"] and chunk["choices"][0]["text"]:
                times.append(moment)
    if not times:
        error = error or "no text came"
    return {"arrival": arrival, "times": times, "token_ids": [0] * len(times), "error": error}


BARE_COMMAND = shlex.join([sys.executable, __file__, "--bare"]) + " {port}"
BARE_MODELS = b'{"data": [{"id": "bare"}]}'
BARE_EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'


class BareConnection(asyncio.Protocol):
    """Answers each request as soon as it is whole: a GET with models, others with one event."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer, unless a part is still to come."""
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not end or len(body) < int(length[1] if length else 0):
            return
        self.data = b""
        answer = BARE_MODELS if head.startswith(b"GET") else BARE_EVENT
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)
        )


async def serve_bare(port: int) -> None:
    """Serve `BareConnection` until a signal."""
    loop = asyncio.get_running_loop()
    async with await loop.create_server(BareConnection, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] == ["--client"]:
        json.dump(follow_requests(json.loads(sys.stdin.readline())), sys.stdout)
    elif sys.argv[1:2] == ["--bare"]:
        asyncio.run(serve_bare(int(sys.argv[2])))
    else:
        result = measure(parse_words(sys.argv[1:]))
        sys.stdout.write(f"{json.dumps(result, indent=1)}\n")
        sys.exit(0 if result["ok"] else 1)
