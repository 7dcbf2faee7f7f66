"""Configurations that strangers publish or edit: the log-probabilities of transformers, or a
refusal by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from often import often

from headstock.errors import ModelError
from headstock.startup.model_loading import read_model
from headstock_conformance.model.parity import (
    add_tensors,
    assert_parity,
    computed,
    expected,
    shape,
    tokens,
    write,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
PROMPT = tokens(40)

REFUSALS = (TypeError, KeyError, ValueError, AttributeError, RuntimeError, StrictDataclassError)
"""What transformers raises where it has no scores: checks of its own, and whatever happens to fail.
"""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SAVED = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
MINISTRAL = ["full_attention", "sliding_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 5}


def written_and_scored(directory: Path, hf: dict[str, Any]) -> torch.Tensor:
    """What transformers makes of the prompt under this configuration."""
    write(directory, hf)
    return expected(directory, PROMPT)


@pytest.mark.parametrize("model_type", often(2, FAMILIES))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_heads_of_real_sizes(model_type: str, head_dim: int, tmp_path: Path) -> None:
    biases = {"attention_bias": True} if model_type in ("llama", "qwen3", "qwen3_moe") else {}
    window = (
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        if model_type != "llama"
        else {}
    )
    write(tmp_path, shape(model_type, head_dim=head_dim, rope_theta=5000.0, **biases, **window))

    assert_parity(tmp_path, PROMPT)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_null_heads_of_keys_are_as_many_as_heads(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, shape(model_type, num_key_value_heads=None))

    assert_parity(tmp_path, PROMPT)


@pytest.mark.parametrize("model_type", often(1, FAMILIES))
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_theta": 300.0},
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 300.0,
                "beta_fast": 8,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            }
        },
        {**SAVED, "rope_scaling": YARN},
        {**SAVED, "rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 300.0},
        {**SAVED, "rope_scaling": {}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
        {"rope_scaling": YARN, "original_max_position_embeddings": 30},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
        {
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 60},
            "original_max_position_embeddings": 16,
        },
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}},
        {
            "rope_theta": 300.0,
            "rope_parameters": {"rope_theta": 40.0},
            "partial_rotary_factor": 1.0,
        },
    ],
    ids=str,
)
def test_rotary_positions(model_type: str, rope: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, shape(model_type, **rope))

    assert_parity(tmp_path, PROMPT)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 5}),
        ("mistral", {"sliding_window": 5, "use_sliding_window": False}),
        ("mistral", {"sliding_window": 5, "layer_types": MINISTRAL}),
        ("mistral", {"sliding_window": 5, "layer_types": ["attention", "sliding_attention"]}),
        ("mistral", {"sliding_window": 5, "layer_types": None}),
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention"] * 2}),
        ("ministral", {"sliding_window": 5}),
        ("qwen2", {**SLIDING, "max_window_layers": 1}),
        ("qwen2", {**SLIDING, "layer_types": MINISTRAL}),
        ("qwen2", {"sliding_window": 5}),
        ("qwen3", {**SLIDING, "max_window_layers": 1}),
        ("qwen3", {**SLIDING, "layer_types": MINISTRAL, "max_window_layers": 0}),
        ("qwen3_moe", {**SLIDING, "max_window_layers": 1}),
        ("llama", {"layer_types": ["attention"] * 2}),
    ],
    ids=str,
)
def test_windows(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": model_type}
    hf = {**shape("mistral"), **mistral} if model_type == "ministral" else shape(model_type)
    write(tmp_path, {**hf, **changes})

    assert_parity(tmp_path, PROMPT)


@pytest.mark.parametrize("model_type", ["ministral", "mistral"])
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 5},
        {"sliding_window": 5, "layer_types": MINISTRAL},
        {"sliding_window": 5, "layer_types": None},
    ],
    ids=str,
)
def test_ministral_under_its_own_name(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    names = {"architectures": ["MinistralForCausalLM"], "model_type": model_type}
    write(tmp_path, {**shape("mistral"), **names, **changes})
    assert read_model(tmp_path)[1].architecture == "MinistralForCausalLM"

    assert_parity(tmp_path, PROMPT)


@pytest.mark.parametrize(
    ("model_type", "window"),
    often(
        1,
        [
            ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
            ("mistral", {"sliding_window": None}),
            ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
            ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}),
            ("mistral", {}),
            ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        ],
    ),
    ids=str,
)
def test_windows_that_show_beyond_4096_tokens(
    model_type: str, window: dict[str, Any], tmp_path: Path
) -> None:
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    write(tmp_path, shape(model_type, max_position_embeddings=8192, **small, **window))

    assert_parity(tmp_path, tokens(4120))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_output_matrix_that_differs_from_tied_embeddings_is_used(
    model_type: str, tmp_path: Path
) -> None:
    write(tmp_path, shape(model_type, tie_word_embeddings=True))
    tied = computed(tmp_path, PROMPT)
    add_tensors(tmp_path, {"lm_head.weight": torch.randn(96, 32)})

    assert_parity(tmp_path, PROMPT)
    assert (computed(tmp_path, PROMPT) - tied).abs().max() > 1


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "qwen2",
            {"layer_types": MINISTRAL},
            "sliding_window: expected a width",
        ),
        (
            "qwen3",
            {"layer_types": MINISTRAL},
            "sliding_window: expected a width",
        ),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3, **SLIDING},
            "expected 2 entries out of",
        ),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2, "sliding_window": None},
            "sliding_window: expected .* got null",
        ),
        ("mistral", {"layer_types": MINISTRAL, "head_dim": None}, "head_dim is missing"),
        ("mistral", {"layer_types": ["chunked_attention"] * 2}, "expected 2 entries out of"),
        ("mistral", {"num_key_value_heads": None}, "num_key_value_heads: expected .* got null"),
        ("qwen2", {"use_sliding_window": None}, "use_sliding_window: expected .* got null"),
        ("qwen3", {"head_dim": None}, "head_dim: expected .* got null"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {}}, "layer_types": MINISTRAL, **SLIDING},
            "one flat table",
        ),
        ("qwen3_moe", {"num_local_experts": None}, "num_local_experts: expected .* got null"),
        ("llama", {"hidden_size": 34}, "hidden_size: expected .*4.* got 34"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps: expected .* got null"),
        ("llama", {"rope_theta": None}, "rope_theta: expected .* got null"),
        (
            "llama",
            {"rope_scaling": {"rope_type": None, "factor": 2.0}},
            "rope_type: expected .* got null",
        ),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "rope_type: expected .* got 'mrope'"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (
            "llama",
            {"rope_scaling": YARN, "original_max_position_embeddings": None},
            "embeddings: expected .* got null",
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
            "partial_rotary_factor: expected 1.0, .* got 0.5",
        ),
        (
            "qwen3",
            {"rope_scaling": {**YARN, "partial_rotary_factor": None}},
            "partial_rotary_factor: expected 1.0, .* got null",
        ),
        ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config: expected"),
    ],
    ids=str,
)
def test_what_transformers_refuses_is_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(REFUSALS):
        written_and_scored(tmp_path, shape(model_type, **changes))

    with pytest.raises(ModelError, match=message):
        read_model(tmp_path)
