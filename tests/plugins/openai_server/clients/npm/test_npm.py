"""Clients from npm, unchanged, each of which asks the same of a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import OFFLINE, Served, serve
from tool_caller import serve_caller

MODULES = Path(os.environ["NPM_FOLDER"])
"""The folder in which the packages of package.json are installed."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of a server with the demo model, and of one whose model calls a tool."""

    def name(server: Served) -> str:
        return f"http://127.0.0.1:{server.port}"

    with serve("--num-pages", "256") as plain, serve_caller(tmp_path_factory.mktemp("a")) as caller:
        yield [name(plain), name(caller)]


def run(program: str, *arguments: str) -> dict[str, Any]:
    """What the program prints."""
    # Node looks for packages beside the program.
    copy = shutil.copy(Path(__file__).parent / program, MODULES)
    done = subprocess.run(
        ["node", copy, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | OFFLINE,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(last)
    return result


def check(result: dict[str, Any]) -> None:
    assert result["whole"] == result["streamed"] == "5"
    assert (result["call"]["name"], result["call"]["input"]) == ("add", {"a": 2})
    assert result["thinking"] == "Hm."


@pytest.mark.feature("W18")
def test_anthropics_client_streams_calls_tools_and_knows_errors(servers: list[str]) -> None:
    result = run("anthropic.mjs", *servers)
    check(result)
    assert result["error"] == [404, "not_found_error"]


@pytest.mark.feature("W20")
def test_ollamas_client_streams_calls_tools_and_knows_errors(servers: list[str]) -> None:
    result = run("ollama.mjs", *servers)
    check(result)
    assert result["error"] == [404, "the model 'other' does not exist; served: demo"]


@pytest.mark.feature("W1")
def test_openais_client_streams_calls_tools_and_knows_errors(servers: list[str]) -> None:
    result = run("openai.mjs", *servers)
    check(result)
    assert (result["response"], result["error"]) == ("5", [404, "model_not_found"])


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_the_ai_sdk_streams_and_calls_tools_over_two_apis(servers: list[str], api: str) -> None:
    check(run("ai.mjs", *servers, api))
