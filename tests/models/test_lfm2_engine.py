"""LFM2 through the whole engine: the tokens and log-probabilities of transformers, however steps
are cut, whoever is beside a row and whatever fails.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import replayed_sdpa
import torch
from engine_parity import MAX_TOKENS, SMALL, Answer, answer_alone, assert_equal, counted, generate
from fault_injection import start_with_faults
from often import often

from headstock import LLM
from headstock.errors import CannotRun, ModelError
from headstock.execution.buffers import Buffers
from headstock.spi import Shard
from headstock.startup.model_loading import read_model, shard_model
from headstock_conformance.model.parity import write
from headstock_cuda_graph.runner import CudaGraphRunner
from headstock_lfm2.families import LFM2

HF: dict[str, Any] = {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 4,
    "conv_bias": True,
    "block_multiple_of": 8,
    "norm_eps": 1e-4,
    "rope_theta": 300.0,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LFM2 whose first layer has no attention."""
    folder = tmp_path_factory.mktemp("lfm2")
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
    {},
    {"max_batch_tokens": 3, "max_running_requests": 2},
    {"ops": "torch", "max_batch_tokens": 17, "max_running_requests": 5},
    {"paged_attn": "off", "page_size": "auto", "num_pages": None, "max_running_requests": 3},
    {"max_batch_tokens": 1, "max_running_requests": 1},
    {"max_batch_tokens": 9, "max_running_requests": 7, "overlap": False},
    {"ops": "onednn", "scheduler": "prefill-first", "page_size": 1, "num_pages": 300},
    {"ops": "fbgemm", "scheduler": "decode-first", "cache_type": "naive"},
    {"kv_cache": False, "max_batch_tokens": 40},
    {"scheduler": "equal-length", "max_running_requests": 3, "attn": "sdpa,sdpa"},
)


@pytest.mark.feature("T6", "P11")
@pytest.mark.parametrize("settings", often(2, WAYS), ids=str)
def test_tokens_are_those_of_transformers(
    settings: dict[str, Any], checkpoint: Path, reference: list[Answer]
) -> None:
    outputs, engine = generate(checkpoint, **settings)

    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert len(output.token_ids) == MAX_TOKENS
        assert_equal(output, answer, number)
    assert engine.stats().cached_tokens == 0


@pytest.mark.feature("T6")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_preempted_rows_compute_their_states_again(
    overlap: bool, checkpoint: Path, reference: list[Answer]
) -> None:
    settings = {"page_size": 2, "num_pages": 26, "max_seq_len": 41, "max_batch_tokens": 11}
    outputs, engine = generate(checkpoint, overlap=overlap, **settings)

    assert engine.stats().preemptions > 0
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert_equal(output, answer, number)


@pytest.mark.feature("G2")
@pytest.mark.parametrize(
    "settings",
    often(
        1,
        [
            {"max_batch_tokens": 11, "max_running_requests": 7, "num_pages": 26, "overlap": False},
            {},
        ],
    ),
    ids=str,
)
def test_replayed_steps_give_the_tokens_of_transformers(
    settings: dict[str, Any],
    checkpoint: Path,
    reference: list[Answer],
    replayed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    for name in ("replay_rows", "replay_prompts"):
        monkeypatch.setattr(CudaGraphRunner, name, counted(name, counts))
    outputs, _ = generate(checkpoint, attn="sdpa-replayed", runner=replayed_sdpa.RUNNER, **settings)

    assert counts["replay_rows"] > 5 and counts["replay_prompts"]
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert_equal(output, answer, number)


@pytest.mark.parametrize("runner", ["eager", replayed_sdpa.RUNNER])
def test_a_failing_row_leaves_its_neighbours_and_a_finite_state(
    runner: str,
    checkpoint: Path,
    reference: list[Answer],
    replayed: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    states: list[bool] = []
    clean = Buffers.zero_non_finite

    def watched(buffers: Buffers, rows: Any, tables: Any) -> None:
        pages = tables[1][torch.from_numpy(rows), 0].long()
        states.append(bool(buffers.kv[2].state["conv"][pages].isnan().any()))
        clean(buffers, rows, tables)
        assert buffers.kv[2].state["conv"].isfinite().all()

    monkeypatch.setattr(Buffers, "zero_non_finite", watched)
    settings = {"attn": "sdpa-replayed", "ops": "torch", "max_batch_tokens": 19}
    outputs, _ = generate(
        checkpoint,
        runner=runner,
        max_running_requests=3,
        start=start_with_faults("nan@3:1", "nan@9:0"),
        **settings,
    )

    failed = [output for output in outputs if output.finish_reason == "error"]
    assert len(failed) == 2 and states == [True, True]
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert_equal(output, answer, number)
        assert output in failed or len(output.token_ids) == MAX_TOKENS


def test_the_summary_has_the_states_and_their_copies(checkpoint: Path) -> None:
    _, engine = generate(checkpoint, max_running_requests=5, num_pages=40)
    summary = engine.summary

    assert ("prefix reuse", "on", "cache_type (--cache-type) radix") in summary.table
    # Keys and values of two heads of 16 and four tokens, in two layers; three inputs of 32
    # channels, in two layers.
    assert [line.strip() for line in summary.memory[2:]] == [
        "KV pool   160 tokens in 2 groups",
        "full, 2 layers: 40 pages of 4, 2.0 KiB a page, 82.0 KiB",
        "state, 2 layers: 41 pages, 36 snapshots among them, 768 B a page, 31.5 KiB",
    ]
    operations = [value for name, value, _ in summary.table if name == "operations"]
    assert operations == ["all composed"]


def test_a_published_configuration_is_read_whole() -> None:
    # That of LFM2-1.2B, which has fields that nothing reads beside those that say the same.
    sizes = dict.fromkeys(("hidden_size", "block_dim", "conv_dim", "conv_dim_out"), 2048)
    flags = ("block_auto_adjust_ff_dim", "block_use_swiglu", "block_use_xavier_init", "use_pos_enc")
    config = LFM2.config(
        {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            **sizes,
            **dict.fromkeys((*flags, "conv_use_xavier_init", "use_cache"), True),
            **dict.fromkeys(("num_attention_heads", "num_heads"), 32),
            **dict.fromkeys(("norm_eps", "block_norm_eps"), 1e-5),
            **dict.fromkeys(("block_mlp_init_scale", "block_out_init_scale"), 1.0),
            "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "conv_bias": False,
            "eos_token_id": 7,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "max_position_embeddings": 128000,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "torch_dtype": "bfloat16",
            "vocab_size": 65536,
        }
    )

    assert config.ignored_fields == () and config.tied_embeddings
    assert (config.intermediate, config.head_dim, config.ropes[0].theta) == (8192, 64, 1e6)
    full, state = config.kv_groups
    assert full.layers == (2, 5, 8, 10, 12, 14) and len(state.layers) == 10
    # As published; the norms of queries and keys are stored once, and here a row a head.
    sizes = {
        name: 2 * config.head_dim if name.endswith("qk_norm") else prod(spec.shape)
        for name, spec in LFM2.params(config).items()
        if spec.compute is None
    }
    assert sum(sizes.values()) == 1_170_340_608


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_L_cache": 1}, "conv_L_cache: expected 2 to 1024, got 1"),
        ({"layer_types": ["conv"] * 4}, "layer_types or full_attn_idxs: expected"),
        (
            {"layer_types": ["mamba"] * 4},
            "layer_types: expected 4 entries out of full_attention, conv",
        ),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_a_line_before_weights_load(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | changes), encoding="utf-8")

    with pytest.raises(ModelError, match=r"^[^\n]*$") as error:
        LLM(str(tmp_path), **SMALL)

    assert message in str(error.value)


def test_channels_that_shards_do_not_divide_are_refused(tmp_path: Path) -> None:
    changes = {"hidden_size": 33, "num_attention_heads": 6, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(HF | changes), encoding="utf-8")
    family, config = read_model(tmp_path)

    with pytest.raises(CannotRun, match=r"hidden_size: expected .* 2 shards, got 33") as error:
        shard_model(family, config, Shard(index=0, count=2))
    assert error.value.exit_code == 5
