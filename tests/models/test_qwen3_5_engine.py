"""Qwen3.5 through the whole engine: the tokens of transformers, however steps are cut, whoever is
beside a row, and after preemption.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import replayed_sdpa
from engine_parity import Answer, answer_alone, assert_equal, counted, generate
from often import often

from headstock.errors import ModelError
from headstock.startup.model_loading import read_model
from headstock_conformance.model.parity import tokens, write
from headstock_cuda_graph.runner import CudaGraphRunner

HF: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_5")
    write(folder, HF)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[Answer]:
    """What transformers makes of each prompt alone."""
    return answer_alone(checkpoint)


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[None]:
    """A backend and a runner for graphs that compute again."""
    with replayed_sdpa.installed(tmp_path):
        yield


WAYS: Sequence[dict[str, Any]] = (
    {"max_batch_tokens": 3, "max_running_requests": 2},
    {"page_size": 2, "num_pages": 26, "max_seq_len": 41, "max_batch_tokens": 11},
    {},
    {"max_batch_tokens": 9, "max_running_requests": 7, "overlap": False},
    {"ops": "onednn", "scheduler": "prefill-first", "page_size": 1, "num_pages": 300},
    {"ops": "fbgemm", "scheduler": "decode-first", "cache_type": "naive"},
    {"kv_cache": False, "max_batch_tokens": 40},
    {"debug_ops": True, "ops": "fbgemm"},
)


@pytest.mark.feature("P13")
@pytest.mark.parametrize("settings", often(1, WAYS), ids=str)
def test_tokens_are_those_of_transformers(
    settings: dict[str, Any], checkpoint: Path, reference: list[Answer]
) -> None:
    outputs, engine = generate(checkpoint, **settings)

    assert (engine.stats().preemptions > 0) == (settings.get("num_pages") == 26)
    assert engine.stats().cached_tokens == 0
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert_equal(output, answer, number)


@pytest.mark.parametrize(
    "settings",
    often(
        1,
        (
            {"max_batch_tokens": 128, "max_running_requests": 2},
            {"max_batch_tokens": 100, "max_running_requests": 4},
            {},
            {"num_pages": 90, "max_running_requests": 3},
        ),
    ),
    ids=str,
)
def test_prompts_of_several_chunks_give_the_tokens_of_transformers(
    settings: dict[str, Any], checkpoint: Path
) -> None:
    prompts = [tokens(length, seed=length) for length in (63, 2, 64, 150, 200)]
    outputs, _ = generate(
        checkpoint, prompts=prompts, **({"max_seq_len": 220, "num_pages": 300} | settings)
    )
    answers = answer_alone(checkpoint, prompts=prompts)
    for number, (output, answer) in enumerate(zip(outputs, answers, strict=True)):
        assert_equal(output, answer, number)


@pytest.mark.parametrize(("ops", "has_prompts"), often(1, [("own-delta", True), ("torch", False)]))
def test_replayed_steps_give_the_tokens_of_transformers(
    ops: str,
    has_prompts: bool,
    checkpoint: Path,
    reference: list[Answer],
    replayed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    for name in ("replay_rows", "replay_prompts"):
        monkeypatch.setattr(CudaGraphRunner, name, counted(name, counts))
    outputs, _ = generate(checkpoint, attn="sdpa-replayed", runner=replayed_sdpa.RUNNER, ops=ops)

    # A composed rule goes through prompts chunk by chunk: a graph of those would be as long.
    assert counts["replay_rows"] > 5 and bool(counts["replay_prompts"]) is has_prompts
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert_equal(output, answer, number)


def test_the_summary_has_the_memories(checkpoint: Path) -> None:
    _, engine = generate(checkpoint, max_running_requests=5, num_pages=40)

    # Three inputs of 80 channels and memories of four heads, 8 by 12, in three layers.
    assert any(
        line.strip().startswith("state, 3 layers: 7 pages, 2 snapshots among them, 7.3 KiB a page")
        for line in engine.summary.memory
    )
    assert ("prefix reuse", "on", "cache_type (--cache-type) radix") in engine.summary.table


def test_a_step_too_small_for_a_chunk_beside_all_rows_forbids_snapshots(checkpoint: Path) -> None:
    _, engine = generate(checkpoint, max_running_requests=5, max_batch_tokens=68)

    ((_, who),) = [entry[1:] for entry in engine.summary.table if entry[0] == "prefix reuse"]
    assert who.endswith(
        "max_batch_tokens (--max-batch-tokens) 68 has no room for 64 tokens beside those of "
        "max_running_requests (--max-running-requests) 5"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: expected a multiple of .*2.* 3"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected 2 or more, got 1"),
        (
            {"layer_types": ["linear_attention"] * 4},
            "layer_types: expected full_attention for some layer",
        ),
        ({"layer_types": ["conv"] * 4}, "layer_types: expected 4 entries out of linear_attention"),
    ],
)
def test_what_cannot_be_served_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | changes))
    with pytest.raises(ModelError, match=said):
        read_model(tmp_path)
