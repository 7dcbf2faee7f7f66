"""What config.json may say, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstock.nn.rope import SCALINGS
from headstock.spi import Feature, FullKV, KVGroup
from headstock_gemma.families import GEMMA2
from headstock_lfm2.families import LFM2
from headstock_llama.families import LLAMA, MISTRAL
from headstock_llama.variants import GRANITE, SEED_OSS, SMOLLM3
from headstock_olmo.families import OLMO2
from headstock_qwen.families import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

HF: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}


def test_fields_and_defaults() -> None:
    config = LLAMA.config({**HF, "eos_token_id": [7, 9, 7], "torch_dtype": "bfloat16"})

    assert (config.head_dim, config.heads, config.kv_heads, config.ropes[0].theta) == (
        8,
        4,
        2,
        10000.0,
    )
    assert (config.eos_ids, config.dtype, config.norm_eps) == ((7, 9), "bfloat16", 1e-6)
    assert config.kv_groups == (
        KVGroup(layers=(0, 1, 2, 3), layout=FullKV(kv_heads=2, k_dim=8, v_dim=8)),
    )
    assert config.features == frozenset()
    assert QWEN3.config(HF).head_dim == 128


@pytest.mark.parametrize(
    ("family", "kv_heads"), [(LLAMA, 64), (MISTRAL, 8), (QWEN2, 32), (QWEN3, 32), (QWEN3_MOE, 4)]
)
def test_the_default_of_kv_heads_is_the_familys(family: Any, kv_heads: int) -> None:
    without = {name: value for name, value in HF.items() if name != "num_key_value_heads"}

    assert (
        family.config({**without, "hidden_size": 128, "num_attention_heads": 64}).kv_heads
        == kv_heads
    )


@pytest.mark.parametrize("family", [LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_attention_is_scaled_by_one_over_the_root_of_head_dim(family: Any, head_dim: int) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = family.config({**HF, **(experts if family is QWEN3_MOE else {}), "head_dim": head_dim})

    assert config.head_dim == head_dim
    assert [layer.scale for layer in config.layers] == [
        pytest.approx(1 / head_dim**0.5, rel=1e-12)
    ] * 4


def test_rope_before_and_after_transformers_5() -> None:
    old = {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}

    before, after = (LLAMA.config({**HF, **rope}).ropes[0] for rope in (old, new))

    assert (before.theta, before.scaling, before.parameters["factor"]) == (5000.0, "linear", 2.0)
    assert (after.theta, after.scaling, after.parameters["factor"]) == (5000.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("family", "changes", "windows", "kinds"),
    [
        (MISTRAL, {}, [None] * 4, ["full"]),  # its default of 4096 is past the last position
        (MISTRAL, {"sliding_window": 99}, [99] * 4, ["window"]),
        (MISTRAL, {"sliding_window": None}, [None] * 4, ["full"]),
        (QWEN2, {"sliding_window": 99}, [None] * 4, ["full"]),
        (
            QWEN2,
            {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 3},
            [None] * 3 + [99],
            ["full", "window"],
        ),
        (
            QWEN3,
            {
                "sliding_window": 99,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [99, None, 99, None],
            ["full", "window"],
        ),
    ],
)
def test_windows_and_groups(
    family: Any, changes: dict[str, Any], windows: list[int | None], kinds: list[str]
) -> None:
    config = family.config({**HF, **changes})

    assert [layer.window for layer in config.layers] == windows
    assert ["window" if group.window else "full" for group in config.kv_groups] == kinds
    assert (Feature.SLIDING_WINDOW in config.features) == any(windows)
    for layer in config.layers:
        assert layer.index in config.kv_groups[layer.group].layers
        assert config.kv_groups[layer.group].window == layer.window


@pytest.mark.parametrize(
    ("family", "field"),
    [
        (LLAMA, "attention_bias"),
        (LLAMA, "mlp_bias"),
        (QWEN3, "attention_bias"),
        (QWEN3_MOE, "attention_bias"),
        (SEED_OSS, "attention_bias"),
        (SEED_OSS, "attention_out_bias"),
        (OLMO2, "attention_bias"),
        (GEMMA2, "attention_bias"),
        (GRANITE, "mlp_bias"),
        (SMOLLM3, "attention_bias"),
        (LFM2, "conv_bias"),
        (QWEN2_MOE, "qkv_bias"),
    ],
)
def test_a_null_bias_is_none_whatever_the_default(family: Any, field: str) -> None:
    def find_biases(value: object) -> tuple[bool, ...]:
        config = family.config({**HF, field: value})
        biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
        return (*biases, *(each.conv.bias for each in config.layers if each.conv))

    # Seed-OSS has others by default.
    assert not any(find_biases(None)) or field == "attention_out_bias"
    assert find_biases(None) == find_biases(False)
    with pytest.raises(ValueError, match=f"{field}: expected true or false, got 'no'"):
        find_biases("no")


def test_a_null_number_that_no_default_stands_for_is_named() -> None:
    with pytest.raises(ValueError, match=r"rms_norm_eps: expected .* got null"):
        LLAMA.config({**HF, "rms_norm_eps": None})


def test_yarn_stretches_the_longest_sequence() -> None:
    for rope in (YARN, {**YARN, "finetuned": True}):  # a key that nobody reads is no obstacle
        assert LLAMA.config({**HF, "rope_scaling": rope}).max_position == 4000
    assert (
        LLAMA.config({**HF, "rope_scaling": {"type": "yarn", "factor": 2.0}}).max_position == 1000
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size: expected a whole number, got null"),
        ({"hidden_size": "32"}, "hidden_size: expected a whole number, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a number above 0, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 1024, got 1000000000"),
        ({"num_attention_heads": 5000}, "num_attention_heads: expected at most 4096, got 5000"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads: expected .*4.* got 3",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected .* got NaN"),
        (
            {"hidden_act": "relu"},
            "hidden_act: expected one of silu, swish, gelu.* got 'relu'",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type: expected one of default, dynamic.* got 'longrope'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": None}},
            "rope_parameters: factor: expected .* got null",
        ),
        (
            {"rope_scaling": {**YARN, "truncate": "yes"}},
            "truncate: expected true or false, got 'yes'",
        ),
        (
            {"rope_scaling": {**YARN, "beta_fast": "a"}},
            "beta_fast: expected .* got 'a'",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_type: expected one of .* got .*yarn"),
        ({"rope_parameters": []}, r"rope_parameters: expected one flat table .* got '\[\]'"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected one flat table .* got 'yarn'"),
        ({"head_dim": 7}, "head_dim: expected an even number.* got 7"),
        (
            {"rope_scaling": {"type": "linear", "factor": "x"}},
            "factor: expected .* got 'x'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "expected one flat table",
        ),
        ({"rope_theta": 0.5}, "rope_theta: expected .* got 0.5"),
        ({"eos_token_id": "x"}, "eos_token_id: expected .* got 'x'"),
        ({"dtype": "int8"}, "dtype: expected one of float32.* got 'int8'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: expected 4 entries"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        QWEN2.config({**HF, **changes})


def test_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok: expected at most 4, got 8"):
        QWEN3_MOE.config({**HF, "num_experts": 4})


def test_more_experts_than_can_be_named_one_by_one() -> None:
    with pytest.raises(ValueError, match=r"experts .*: expected at most 4096, got 1000000"):
        QWEN3_MOE.config({**HF, "num_experts": 10**6})


@pytest.mark.parametrize(
    "rope",
    [
        {**YARN, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "truncate": False},
        {**YARN, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 500,
        },
        {"rope_type": "linear", "factor": 3.0},
    ],
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 10000.0, **rope}
    ours = QWEN3.config({**HF, "rope_parameters": rope})
    theirs = Qwen3Config(
        **{**HF, "max_position_embeddings": ours.max_position, "rope_parameters": dict(rope)}
    )

    frequencies, factor = SCALINGS[ours.ropes[0].scaling](
        ours.ropes[0], ours.max_position, ours.max_position
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))

    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)
