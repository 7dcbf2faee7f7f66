"""Every field of config.json is read, known to change nothing, refused by name, or named aloud."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import GenerationConfig, PreTrainedConfig

from headstock.errors import ModelError
from headstock.nn.config_keys import HARMLESS, UNSERVED
from headstock.nn.decoder_config import FIELDS
from headstock.spi import ModelConfig
from headstock.startup.model_loading import read_model
from headstock_conformance.model.parity import ARCHITECTURES, shape
from headstock_llama.families import LLAMA, MISTRAL
from headstock_qwen.families import QWEN2, QWEN3, QWEN3_MOE

FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}

SERVED_BY = {
    "mistral": ("sliding_window",),
    "qwen2": ("sliding_window",),
    "qwen3": ("sliding_window", "qk_norm", "use_qk_norm"),
    "qwen3_moe": ("sliding_window", "qk_norm", "use_qk_norm"),
}
"""What these families read of that which others refuse."""

QWEN: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}
PUBLISHED = {
    "Llama-2": (
        "llama",
        {"pretraining_tp": 1, "max_length": 4096, "_name_or_path": "x", "rope_scaling": None},
    ),
    "Llama-3.1": (
        "llama",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "eos_token_id": [7, 8, 9],
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            "unsloth_fixed": True,
            "pad_token_id": 5,
        },
    ),
    "Mistral-7B": (
        "mistral",
        {"sliding_window": None, "attention_dropout": 0.0, "use_cache": True, "rope_theta": 1e6},
    ),
    "Ministral-8B": (
        "mistral",
        {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Qwen2.5": (
        "qwen2",
        {**QWEN, "use_mrope": False, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    ),
    "Qwen3": ("qwen3", {**QWEN, "attention_bias": False}),
    "Qwen3-Coder": (
        "qwen3_moe",
        {
            **QWEN,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "output_router_logits": False,
            "qkv_bias": False,
            "router_aux_loss_coef": 0.0,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
    ),
}


def config(family: str, **changes: Any) -> ModelConfig:
    """What the family reads of a small model with these changes."""
    read: ModelConfig = FAMILIES[family].config({**shape(family), **changes})
    return read


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_leave_nothing_unread(name: str) -> None:
    model_type, changes = PUBLISHED[name]

    assert config(model_type, **changes).ignored_fields == ()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_that_transformers_writes_of_a_configuration_is_known(model_type: str) -> None:
    family = {"qwen3_moe": "Qwen3Moe"}.get(model_type, model_type.capitalize())
    full = getattr(transformers, f"{family}Config")(**shape(model_type)).to_json_string(
        use_diff=False
    )

    assert FAMILIES[model_type].config(json.loads(full)).ignored_fields == ()


def test_the_fields_that_every_configuration_of_transformers_has_are_known() -> None:
    common = {each.name for each in fields(PreTrainedConfig)} | {
        *GenerationConfig._get_default_generation_params()
    }

    assert common <= HARMLESS | FIELDS | {*UNSERVED}


@pytest.mark.parametrize(
    ("model_type", "changes", "ignored"),
    [
        (
            "llama",
            {"mup_scale": 3, "use_sliding_window": True, "gate_cap": None},
            ("mup_scale", "use_sliding_window"),
        ),
        ("llama", {"sliding_window": None, "use_sliding_window": None}, ()),
        (
            "mistral",
            {"use_sliding_window": False, "sliding_window": 8},
            ("use_sliding_window",),
        ),
        ("mistral", {"use_sliding_window": False, "sliding_window": None}, ()),
        ("qwen2", {"num_experts": 4}, ("num_experts",)),
        ("qwen3", {"rope_scaling": {"type": "default", "factor": 2.0}}, ("rope_scaling.factor",)),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 9.0, "mrope_section": [1]}},
            ("rope_parameters.mrope_section",),
        ),
        ("qwen3", {"rope_theta": 8.0, "rope_parameters": {"rope_theta": 9.0}}, ("rope_theta",)),
        ("qwen3", {"rope_theta": 9, "rope_parameters": {"rope_theta": 9.0}}, ()),
        ("qwen2", {"original_max_position_embeddings": 9}, ("original_max_position_embeddings",)),
        (
            "llama",
            {
                "rope_parameters": {"rope_theta": 9.0},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            ("rope_parameters",),
        ),
    ],
    ids=str,
)
def test_what_is_not_read_is_named(
    model_type: str, changes: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    assert config(model_type, **changes).ignored_fields == ignored


def test_the_unread_fields_are_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strange = {f"strange_{number}": 1 for number in range(10)}
    (tmp_path / "config.json").write_text(json.dumps(shape("llama", **strange)))

    with caplog.at_level(logging.WARNING, "headstock"):
        read_model(tmp_path)

    (record,) = caplog.records
    assert 'event="LlamaForCausalLM does not read all of config.json"' in str(record.msg)
    assert "strange_0, strange_1," in str(record.msg)
    assert str(record.msg).endswith("more=2")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        (family, name)
        for family in FAMILIES
        for name in UNSERVED
        if name not in SERVED_BY.get(family, ())
    ],
)
def test_what_changes_the_numbers_and_is_not_served_is_refused(model_type: str, name: str) -> None:
    for value in UNSERVED[name]:
        assert config(model_type, **{name: value}).ignored_fields == ()
    with pytest.raises(ValueError, match=f"^{name}: expected .* got 7.5, .* not supported$"):
        config(model_type, **{name: 7.5})


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3_moe", {"layer_types": None}),
    ],
)
def test_layer_types_where_the_family_has_none(model_type: str, changes: dict[str, Any]) -> None:
    if changes["layer_types"] is None:
        window = {"use_sliding_window": True, "sliding_window": 5}
        changes = {"layer_types": ["full_attention"] * 2, **window}
    with pytest.raises(ValueError, match=r"^layer_types: expected '.*' for every layer, got "):
        config(model_type, **changes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_type_of_another_family_is_refused(model_type: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"model_type: expected .* for {ARCHITECTURES[model_type]}, got 'gemma'",
    ):
        config(model_type, model_type="gemma")
    assert config(model_type, model_type=None).architecture == ARCHITECTURES[model_type]


@pytest.mark.parametrize("name", ["partial_rotary_factor", "rope_scaling"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_part_of_the_head_is_refused(model_type: str, name: str) -> None:
    changes = (
        {name: 0.5} if name == "partial_rotary_factor" else {name: {"partial_rotary_factor": 0.5}}
    )
    with pytest.raises(ValueError, match=r"partial_rotary_factor: expected 1.0, .* got 0.5"):
        config(model_type, **changes)


@pytest.mark.parametrize("name", ["configuration_files", "transformers_weights"])
def test_other_files_are_not_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(shape("llama", **{name: ["config.4.0.0.json"]}))
    )

    with pytest.raises(ModelError, match=f"config.json has {name}, which points to other files"):
        read_model(tmp_path)
