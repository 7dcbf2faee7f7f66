"""The programs of docs/examples, run as their users run them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from source_tree import ROOT

from headstock import LLM, SamplingParams

EXAMPLES = ROOT / "docs" / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HEADSTOCK_NUM_PAGES": "256"}


def test_the_batch_program_answers_every_line_in_order(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("12 + 30 =\n47 + 38 =\n23 + 48 =\n")
    command = [sys.executable, str(EXAMPLES / "batch.py"), str(prompts), str(answers)]
    subprocess.run(command, check=True, timeout=150, env=ENVIRONMENT)

    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [record["text"] for record in records] == [" 42.", " 85.", " 71."]
    assert {record["finish_reason"] for record in records} == {"stop"}


@pytest.fixture
def server() -> Iterator[int]:
    """The port of a running stream_server.py."""
    command = [sys.executable, str(EXAMPLES / "stream_server.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        try:
            announced = re.search(r"port (\d+)", process.stdout.readline())
            assert announced is not None, "the server ended before it listened"
            yield int(announced[1])
        finally:
            process.kill()


def fetch(port: int, prompt: str) -> str:
    """The whole answer to a prompt."""
    address = f"http://127.0.0.1:{port}/?prompt={quote(prompt)}"
    with urllib.request.urlopen(address, timeout=60) as response:
        text: str = response.read().decode()
    return text


def test_the_server_streams_to_several_clients_and_outlives_one_that_leaves(server: int) -> None:
    with socket.create_connection(("127.0.0.1", server), timeout=60) as leaves:
        leaves.sendall(b"GET /?prompt=Once HTTP/1.0\r\n\r\n")
        assert leaves.recv(15) == b"HTTP/1.0 200 OK"
    with ThreadPoolExecutor() as clients:
        answers = list(
            clients.map(lambda prompt: fetch(server, prompt), ["12 + 30 =", "47 + 38 ="])
        )
    assert answers == [" 42.", " 85."]


def test_the_attention_plugin_says_what_sdpa_says(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    plugin = EXAMPLES / "attention-plugin"
    subprocess.run(build, cwd=plugin, check=True, timeout=150, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    unpack = [sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)]
    subprocess.run(unpack, check=True, timeout=150)
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    prompts = ["12 + 30 =", "Remember this number: 4711. " * 10, "Once upon a time"]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    flags += ["--temperature", "0", "--max-tokens", "24", "--json", "--quiet"]

    program = [sys.executable, "-m", "headstock", "run", "--attn", "rowwise", *flags]
    environment = {**ENVIRONMENT, "PYTHONPATH": paths}
    done = subprocess.run(
        program, check=True, timeout=150, capture_output=True, text=True, env=environment
    )
    found = [tuple(json.loads(line)["token_ids"]) for line in done.stdout.splitlines()]
    with LLM("demo", attn="sdpa", num_pages=256) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    assert found == [output.outputs[0].token_ids for output in outputs]
    assert [len(tokens) for tokens in found] == [5, 24, 24]
