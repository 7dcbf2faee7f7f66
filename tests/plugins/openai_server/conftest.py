"""Servers that tests do not end: with the demo model and small limits, and with tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_templates import HERMES_CALLS
from marked_checkpoint import write_marked_checkpoint
from served import LIMITS, Served, serve


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    limits = [str(each) for pair in LIMITS.items() for each in pair]
    with serve(
        *("--num-pages", "128", "--served-model-name", "demo"),
        *("--served-model-name", "org/demo", "--scoring", "cosine", *limits),
        *("--allow-origins", "https://app.example", "--root-path", "/llm"),
        key="secret",
    ) as served:
        yield served


@pytest.fixture(scope="session")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, dict[str, int]]]:
    """A server of a model with tokens for the marks of calls, and these tokens."""
    folder: Path = tmp_path_factory.mktemp("marked")
    ids = write_marked_checkpoint(folder)
    template = "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}" + HERMES_CALLS
    options = ("--chat-template", template, "--num-pages", "128", "--served-model-name", "demo")
    with serve("--model", str(folder), *options) as served:
        yield served, ids
