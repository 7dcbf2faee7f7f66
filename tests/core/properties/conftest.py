"""Engines of the toy model that live through all examples of the properties of a module.

The loop of a scripted LLM looks for work 2,000 times a second, so it ends with the module.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from core.text.conftest import ScriptedLoop, write_byte_level
from toy_engine import Toys, installed
from toy_text import toy_llm

from headstock import LLM
from headstock.config import EngineConfig
from headstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def toys() -> Iterator[Toys]:
    """The toy plugins, installed."""
    with tempfile.TemporaryDirectory() as folder, installed(Path(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def llm(toys: Toys) -> Iterator[LLM]:
    """The toy model with text, its steps overlapping and its prefixes shared."""
    with toy_llm(toys.folder) as made:
        yield made


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, ScriptedLoop]]:
    """An LLM that says what the loop's `script` tells it."""
    directory = tmp_path_factory.mktemp("told")
    write_byte_level(directory)
    vocab = Tokenizer(directory).vocab_size
    engine = SimpleNamespace(
        directory=directory,
        model=SimpleNamespace(vocab=vocab),
        max_seq_len=256,
        length_hint="shorten it",
        eos_ids=(0,),
        request_args=None,
        check_sampling=None,
        close=lambda: None,
        summary=SimpleNamespace(lines=list, no_text="", placeholders=()),
    )
    loop = ScriptedLoop(vocab)
    with LLM(config=EngineConfig(), start=lambda config: (engine, loop)) as llm:
        yield llm, loop
