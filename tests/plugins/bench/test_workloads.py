"""Workloads are the same every time, and of the sizes that their names promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve
from often import often

from headstock.spi import Experts
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.workloads import DEFAULT_WORKLOADS, WORKLOADS

KNOWN = {
    "offline256": (256, 142_827, 133_966),
    "single": (1, 128, 512),
    "prefix256": (256, 557_056, 16_384),
    "prefill32x4k": (32, 128_000, 32),
    "batch8": (8, 2048, 2048),
    "batch32": (32, 16_384, 8192),
}
"""Requests, tokens in, tokens out: other engines were measured on exactly these."""


@pytest.mark.parametrize("name", KNOWN)
def test_the_work_of_published_figures_is_unchanged(name: str) -> None:
    work = WORKLOADS[name]()
    assert (len(work.prompts), work.tokens_in, work.tokens_out) == KNOWN[name]


def test_work_is_seeded_and_named_as_it_is_listed() -> None:
    assert all(make() == evolve(make(), name=name) for name, make in WORKLOADS.items())
    assert all(name in WORKLOADS for names in DEFAULT_WORKLOADS.values() for name in names)


def test_prefix256_shares_exactly_its_prefix() -> None:
    first, second, *_ = WORKLOADS["prefix256"]().prompts
    assert first[:2048] == second[:2048] and first[2048] != second[2048]


def test_the_cpu_batch_has_the_lengths_it_is_measured_by() -> None:
    work = WORKLOADS["cpu32"]()
    lengths = [len(prompt) for prompt in work.prompts]
    assert len(lengths) == 32 and 16 <= min(lengths) < max(lengths) <= 512
    assert 16 <= min(work.outputs) < max(work.outputs) <= 256


def test_a_small_vocabulary_changes_ids_and_no_length() -> None:
    work = WORKLOADS["cpu32"]()
    small = work.fit_vocab(768)
    assert (
        max(max(prompt) for prompt in small.prompts)
        < 768
        <= max(max(prompt) for prompt in work.prompts)
    )
    assert small.length_summary == work.length_summary


def test_the_shape_with_experts_has_them_in_every_layer(tmp_path: Path) -> None:
    from headstock.startup.model_loading import read_model

    write_model_directory(MODEL_SHAPES["qwen3-30b-a3b"], tmp_path)
    _, model = read_model(tmp_path)

    expected = Experts(count=128, per_token=8, intermediate=768, renormalize=True)
    assert [layer.experts for layer in model.layers] == [expected] * 48


@pytest.mark.parametrize("name", often(2, MODEL_SHAPES))
def test_a_shape_is_a_directory_that_the_engine_can_read(name: str, tmp_path: Path) -> None:
    from headstock.startup.model_loading import read_model
    from headstock.text.tokenizer import Tokenizer

    write_model_directory(MODEL_SHAPES[name], tmp_path)
    _, model = read_model(tmp_path)
    shape = MODEL_SHAPES[name]
    assert (model.hidden, len(model.layers), model.heads, model.kv_heads) == (
        shape.hidden,
        shape.layers,
        shape.heads,
        shape.kv_heads,
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello 😀")) == "Hello 😀"
    assert tokenizer.eos_ids == model.eos_ids and max(tokenizer.eos_ids) < model.vocab


def test_the_demo_shape_is_that_of_the_demo_checkpoint(tmp_path: Path) -> None:
    from headstock.startup.model_loading import locate_model

    write_model_directory(MODEL_SHAPES["demo"], tmp_path)
    mine, theirs = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path, locate_model("demo"))
    )
    sizes = [
        key
        for key, value in mine.items()
        if isinstance(value, int | float) and not key.endswith("_token_id")
    ]
    assert {key: mine[key] for key in sizes} == {key: theirs[key] for key in sizes}
