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
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from source_tree import ROOT

from headstock import LLM, RequestOutput, SamplingParams
from headstock.cli.main import main

EXAMPLES = ROOT / "docs" / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HEADSTOCK_NUM_PAGES": "256"}


def test_the_batch_program_answers_every_line_in_order(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("12 + 30 =\n47 + 38 =\n23 + 48 =\n")
    command = [sys.executable, str(EXAMPLES / "batch.py"), str(prompts), str(answers)]
    subprocess.run(command, check=True, timeout=600, env=ENVIRONMENT)

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
    with urllib.request.urlopen(address, timeout=600) as response:
        text: str = response.read().decode()
    return text


def test_the_server_streams_to_several_clients_and_outlives_one_that_leaves(server: int) -> None:
    with socket.create_connection(("127.0.0.1", server), timeout=600) as leaves:
        leaves.sendall(b"GET /?prompt=Once HTTP/1.0\r\n\r\n")
        assert leaves.recv(15) == b"HTTP/1.0 200 OK"
    with ThreadPoolExecutor() as clients:
        answers = list(
            clients.map(lambda prompt: fetch(server, prompt), ["12 + 30 =", "47 + 38 ="])
        )
    assert answers == [" 42.", " 85."]


def install(plugin: str, folder: Path) -> str:
    """Build the example plugin and unpack it in the folder; return a PYTHONPATH with it."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=EXAMPLES / plugin, check=True, timeout=600, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    unpack = [sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)]
    subprocess.run(unpack, check=True, timeout=600)
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


def answer(
    prompts: list[str], paths: str, *flags: str, temperature: float = 0
) -> list[dict[str, Any]]:
    """What `headstock run` says, one record for each prompt."""
    program = [sys.executable, "-m", "headstock", "run", *flags]
    program += [word for prompt in prompts for word in ("--prompt", prompt)]
    program += ["--temperature", str(temperature), "--max-tokens", "24", "--json", "--quiet"]
    environment = {**ENVIRONMENT, "PYTHONPATH": paths}
    done = subprocess.run(
        program, check=True, timeout=600, capture_output=True, text=True, env=environment
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer_here(prompts: list[str], **settings: Any) -> list[RequestOutput]:
    """What an engine of this process says."""
    with LLM("demo", num_pages=256, **settings) as llm:
        return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))


def test_the_attention_plugin_says_what_sdpa_says(tmp_path: Path) -> None:
    paths = install("attention-plugin", tmp_path)
    prompts = ["12 + 30 =", "Remember this number: 4711. " * 10, "Once upon a time"]

    found = [one["token_ids"] for one in answer(prompts, paths, "--attn", "rowwise")]
    outputs = answer_here(prompts, attn="sdpa")
    assert found == [list(output.outputs[0].token_ids) for output in outputs]
    assert [len(tokens) for tokens in found] == [5, 24, 24]


@pytest.mark.feature("R1")
@pytest.mark.parametrize(
    "name", ["fair-share", pytest.param("shortest-job", marks=pytest.mark.full)]
)
def test_a_scheduler_plugin_serves_and_its_recording_replays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, recording = install(f"{name}-plugin", tmp_path), tmp_path / "run.recording"
    prompts = ["12 + 30 =", "47 + 38 =", "23 + 48 ="]

    flags = ["--scheduler", name, "--max-running-requests", "2", "--record", str(recording)]
    found = answer(prompts, paths, *flags, "--user", "ada")
    assert [one["text"] for one in found] == [" 42.", " 85.", " 71."]
    for folder in paths.split(os.pathsep):
        monkeypatch.syspath_prepend(folder)
    assert main(["replay", str(recording), "--check"]) == 0


@pytest.mark.feature("R7")
@pytest.mark.full
def test_flex_attention_keeps_the_contract_and_says_what_sdpa_says(tmp_path: Path) -> None:
    paths = install("flex-plugin", tmp_path)
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    program += ["-c", "/dev/null", str(EXAMPLES / "flex-plugin" / "tests")]
    environment = {**ENVIRONMENT, "PYTHONPATH": paths}
    done = subprocess.run(
        program, check=False, timeout=600, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 70

    prompts = ["12 + 30 =", "Once upon a time"]
    found = [one["token_ids"] for one in answer(prompts, paths, "--attn", "flex")]
    assert found == [list(one.outputs[0].token_ids) for one in answer_here(prompts, attn="sdpa")]


def test_the_cache_plugin_finds_what_radix_finds(tmp_path: Path) -> None:
    paths = install("cache-plugin", tmp_path)
    head = "Remember this number: 4711. " * 10
    prompts = [f"{head}{end}" for end in ("What is it?", "Once upon a time", "12 + 30 =")]

    found = answer(prompts, paths, "--cache-type", "lfu", "--debug-invariants")
    outputs = answer_here(prompts, cache_type="radix")
    assert [one["token_ids"] for one in found] == [
        list(output.outputs[0].token_ids) for output in outputs
    ]
    cached = [one["usage"]["cached_tokens"] for one in found]
    assert cached == [output.metrics.cached_tokens for output in outputs]
    assert [count >= 64 for count in cached] == [False, True, True]


@pytest.mark.feature("R3")
def test_the_logits_plugin_keeps_what_is_near_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = install("logits-plugin", tmp_path)
    flags = ("--logits-processors", "top-n-sigma", "--extra-args", '{"top_n_sigma": 0.0001}')
    prompts = ["12 + 30 =", "47 + 38 ="]
    found = answer(prompts, paths, *flags, temperature=2.0)
    assert [one["text"] for one in found] == [" 42.", " 85."], "the best token alone is left"

    monkeypatch.syspath_prepend(paths.split(os.pathsep)[0])
    make = import_module("headstock_top_n_sigma.processor").TopNSigma
    wanted = import_module("headstock_top_n_sigma.args").TopNSigmaArgs
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)) * 4
    logits[1, :300] = -torch.inf
    sigmas = torch.tensor([1.0, 2.5, torch.inf])
    scores = make().apply(logits.clone(), torch.zeros(3), {"n": sigmas})
    for row, score, sigma in zip(logits, scores, sigmas, strict=True):
        known = row[row.isfinite()].double()
        kept = row >= known.max() - sigma * known.std(correction=0)
        assert torch.equal(score.isfinite(), kept & row.isfinite())
    assert (
        make().row(wanted(top_n_sigma=2), [], 9) == {"n": 2.0} and make().row(None, [], 9) is None
    )
    with pytest.raises(ValueError, match="must be > 0"):
        wanted(top_n_sigma=0)
