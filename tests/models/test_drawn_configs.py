"""Any configuration: headstock refuses it by name, or has the log-probabilities of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock.errors import ModelError
from headstock.startup.model_loading import read_model
from headstock_conformance.model.parity import (
    ARCHITECTURES,
    add_tensors,
    computed,
    expected,
    shape,
    tokens,
    write,
)

ORIGINAL = "original_max_position_embeddings"

NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ("factor",)),
    "linear": (("factor",), (ORIGINAL,)),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL, "beta_fast")),
    "yarn": (
        ("factor",),
        (
            ORIGINAL,
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
"""Type of scaling -> the numbers that a drawn table always has, and those that it may have."""

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "factor": st.sampled_from([1.0, 1.5, 2, 4.0, 8.0]),
    "low_freq_factor": st.sampled_from([0.5, 1, 1.0]),
    "high_freq_factor": st.sampled_from([2.5, 4, 4.0]),
    ORIGINAL: st.sampled_from([16, 24, 40, 64]),
    "beta_fast": st.sampled_from([4, 8.0, 32, None]),
    "beta_slow": st.sampled_from([1, 2.0]),
    "attention_factor": st.sampled_from([0.7, 1.3, None]),
    "mscale": st.sampled_from([0.7, 1.0, None]),
    "mscale_all_dim": st.sampled_from([0.5, 1.0, None]),
    "truncate": st.booleans(),
    "rope_theta": st.sampled_from([50.0, 300.0, 10000, 1e6]),
}


DELTA_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
CAPS = st.sampled_from([None, 0.5, 3.0, 1000.0])
FACTORS = st.sampled_from([0.3, 1.0, 2.5])
# Scores are not scaled by default, and float32 has no four digits of their softmax then.
SCALED: dict[str, st.SearchStrategy[Any]] = {
    "attention_multiplier": st.sampled_from([0.02, 0.1]),
    "logits_scaling": st.sampled_from([1.0, 2.5]),
}
BETA = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "factor": VALUES["factor"],
        ORIGINAL: st.sampled_from([5, 40, 64]),
        "llama_4_scaling_beta": st.sampled_from([0, 0.1, 0.7]),
    },
    optional={name: VALUES[name] for name in ("rope_theta", "mscale", "mscale_all_dim")},
)
REQUIRED: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "deepseek_v2": {"num_key_value_heads": st.none()},
    "deepseek_v3": {"num_key_value_heads": st.none()},
    "glm4_moe_lite": {"num_attention_heads": st.just(4), "num_key_value_heads": st.just(4)},
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), SCALED),
    "ministral3": {"rope_parameters": BETA},
    # transformers computes prompts in chunks, whose rounding small norms would enlarge.
    **{name: {"rms_norm_eps": st.just(0.3)} for name in DELTA_TYPES},
}
REFUSED = {
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), ("rms_norm_eps", "sliding_window", "partial_rotary_factor")
    ),
    "ministral3": ("rope_parameters", "rope_scaling", ORIGINAL),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        ("num_key_value_heads", "head_dim", "sliding_window", "partial_rotary_factor"),
    ),
}
"""Fields of most families whose drawn values these refuse."""

CHOICE: dict[str, st.SearchStrategy[Any]] = {
    "first_k_dense_replace": st.integers(0, 2),
    "n_shared_experts": st.integers(0, 2),
    "routed_scaling_factor": FACTORS,
    "topk_group": st.integers(1, 3),
    "norm_topk_prob": st.booleans(),
}
GROUPS = {**CHOICE, "n_group": st.sampled_from([1, 2, 4])}
LATENT = {**CHOICE, "q_lora_rank": st.sampled_from([None, 20])}

CONVOLUTIONS = st.sampled_from(["conv", "full_attention"])
MULTIPLIED = {"embedding_multiplier": FACTORS, "residual_multiplier": FACTORS}

DELTAS = st.sampled_from(["linear_attention", "full_attention"])

KINDS = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTIONS),
    **dict.fromkeys(DELTA_TYPES, DELTAS),
}
DELTA = {
    "full_attention_interval": st.integers(1, 3),
    "linear_conv_kernel_dim": st.integers(1, 4),
    "linear_num_key_heads": st.sampled_from([1, 2]),
    "linear_num_value_heads": st.sampled_from([2, 3, 4]),
    "linear_key_head_dim": st.sampled_from([4, 9]),
}
FAMILY_FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "qwen3_moe": {
        "num_experts": st.sampled_from([2, 4]),
        "num_local_experts": st.sampled_from([2, 4]),
        "norm_topk_prob": st.booleans(),
        "decoder_sparse_step": st.integers(1, 2),
        "mlp_only_layers": st.sampled_from([None, [], [0], [1]]),
    },
    "qwen2_moe": {
        "norm_topk_prob": st.booleans(),
        "decoder_sparse_step": st.integers(1, 2),
        "mlp_only_layers": st.sampled_from([[], [0], [1]]),
        "qkv_bias": st.booleans(),
        "shared_expert_intermediate_size": st.sampled_from([8, 28]),
    },
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_next": {
        **DELTA,
        "norm_topk_prob": st.booleans(),
        "decoder_sparse_step": st.integers(1, 2),
        "mlp_only_layers": st.sampled_from([None, [], [0], [1]]),
        "num_local_experts": st.just(3),
    },
    "mixtral": {"num_local_experts": st.sampled_from([2, 4]), "num_experts": st.just(3)},
    "ernie4_5": {"use_bias": st.booleans()},
    "ernie4_5_moe": {
        "moe_k": st.integers(1, 3),
        "moe_num_shared_experts": st.integers(0, 2),
        "moe_layer_start_index": st.integers(0, 2),
        "moe_layer_end_index": st.integers(-1, 2),
        "moe_layer_interval": st.integers(1, 2),
    },
    "gemma2": {
        "attn_logit_softcapping": CAPS,
        "final_logit_softcapping": CAPS,
        "query_pre_attn_scalar": st.sampled_from([2, 16, 100]),
        "hidden_activation": st.sampled_from(["gelu_pytorch_tanh", "gelu", "silu"]),
    },
    "gemma3_text": {
        "final_logit_softcapping": CAPS,
        "query_pre_attn_scalar": st.sampled_from([2, 16, 100]),
        "sliding_window_pattern": st.integers(1, 3),
        "rope_local_base_freq": VALUES["rope_theta"],
    },
    "granite": MULTIPLIED,
    "granitemoe": MULTIPLIED,
    "granitemoeshared": MULTIPLIED,
    "smollm3": {
        "no_rope_layer_interval": st.integers(1, 3),
        "no_rope_layers": st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=3),
    },
    "seed_oss": {"attention_out_bias": st.booleans()},
    "deepseek_v2": {
        **LATENT,
        "topk_method": st.sampled_from(["greedy", "group_limited_greedy"]),
        "n_group": st.sampled_from([1, 2, 8]),
        "norm_topk_prob": st.just(False),
    },
    "deepseek_v3": {
        **LATENT,
        "n_group": st.sampled_from([1, 2, 4, 12]),
        "rope_interleave": st.booleans(),
    },
    "glm4_moe": {
        **GROUPS,
        "use_qk_norm": st.booleans(),
    },
    "glm4_moe_lite": {
        **LATENT,
        "first_k_dense_replace": st.just(1),
        "n_group": st.sampled_from([1, 2, 4]),
        "rope_interleave": st.booleans(),
    },
    "hy_v3": {
        "num_shared_experts": st.integers(1, 2),
        "router_scaling_factor": FACTORS,
        "mlp_layer_types": st.none()
        | st.lists(st.sampled_from(["dense", "sparse"]), min_size=1, max_size=3),
    },
    "minimax_m2": {"rotary_dim": st.sampled_from([4, 8, 6])},
    "exaone4": {"sliding_window_pattern": st.integers(1, 3)},
    "lfm2_moe": {
        "norm_eps": st.sampled_from([1e-6, 1e-2]),
        "conv_bias": st.booleans(),
        "conv_L_cache": st.integers(1, 4),
        "use_expert_bias": st.booleans(),
        "norm_topk_prob": st.booleans(),
        "routed_scaling_factor": FACTORS,
        "num_dense_layers": st.integers(0, 2),
    },
    "lfm2": {
        "norm_eps": st.sampled_from([1e-6, 1e-2]),
        "conv_bias": st.booleans(),
        "conv_L_cache": st.integers(1, 4),
    },
}
"""`model_type` -> fields of its own, or of families like it."""


@st.composite
def rope_tables(draw: st.DrawFn) -> dict[str, Any]:
    """A table of rotary positions, in the spelling of any release."""
    kind = draw(st.sampled_from([*NUMBERS, "yarn", "llama3", "longrope"]))
    required, optional = NUMBERS.get(kind, ((), ()))
    named = draw(
        st.fixed_dictionaries({draw(st.sampled_from(["type", "rope_type"])): st.just(kind)})
    )
    numbers = draw(
        st.fixed_dictionaries(
            {name: VALUES[name] for name in required},
            optional={name: VALUES[name] for name in (*optional, "rope_theta")},
        )
    )
    return named | numbers


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """config.json of a small model of any family, with fields that its family reads and fields that
    it does not.
    """
    model_type = draw(st.sampled_from(sorted({*ARCHITECTURES, *FAMILIES})))
    layers, heads = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 6]))
    rope = st.none() | st.just({}) | rope_tables()
    types = st.sampled_from(["full_attention", "sliding_attention", "attention"])
    changes: dict[str, st.SearchStrategy[Any]] = {
        "num_hidden_layers": st.just(layers),
        "num_attention_heads": st.just(heads),
        "num_key_value_heads": st.sampled_from([n for n in (1, 2, 3) if heads % n == 0]),
        "hidden_size": st.sampled_from([heads * 4, heads * 8]),
        "head_dim": st.sampled_from([8, 16, 64, 80, 96, 128]),
        "max_position_embeddings": st.sampled_from([40, 64]),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "tie_word_embeddings": st.booleans(),
        "rope_theta": VALUES["rope_theta"],
        "rope_scaling": rope,
        "rope_parameters": rope,
        ORIGINAL: VALUES[ORIGINAL],
        "partial_rotary_factor": st.sampled_from([1.0, 1, None, 0.5]),
        "sliding_window": st.sampled_from([1, 2, 5, 16, 4096, None]),
        "use_sliding_window": st.booleans(),
        "max_window_layers": st.integers(0, 3),
        "layer_types": st.none()
        | st.lists(KINDS.get(model_type, types), min_size=layers, max_size=layers),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "hidden_act": st.sampled_from(["silu", "swish"]),
    }
    for name in REFUSED.get(model_type, ()):
        (changes if name in changes else optional).pop(name)
    drawn = draw(
        st.fixed_dictionaries(
            changes | REQUIRED.get(model_type, {}),
            optional=optional | FAMILY_FIELDS.get(model_type, {}),
        )
    )
    return Case(model_type, drawn).hf if model_type in FAMILIES else shape(model_type, **drawn)


def assert_parity_or_refusal(
    directory: Path, hf: dict[str, Any], has_head: bool, chunk: int | None
) -> None:
    """Headstock has the scores of transformers, or raises ModelError."""
    prompt = tokens(40)
    try:
        write(directory, hf)
        if has_head:
            add_tensors(
                directory,
                {"lm_head.weight": torch.randn(hf["vocab_size"], hf["hidden_size"]) * 0.3},
            )
        theirs = expected(directory, prompt)
    except Exception:  # whatever fails in transformers: it has no scores then, and nobody may
        with pytest.raises(ModelError):
            read_model(directory)
        return
    try:
        ours = computed(directory, prompt, chunk)
    except ModelError:
        return
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


CASES = {"hf": configurations(), "has_head": st.booleans(), "chunk": st.sampled_from([None, 7])}


@settings(
    max_examples=count_examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(**CASES)
def test_a_drawn_configuration_is_served_as_transformers_does_or_refused(
    hf: dict[str, Any], has_head: bool, chunk: int | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert_parity_or_refusal(Path(directory), hf, has_head, chunk)


def test_a_window_without_a_width_is_refused_where_transformers_asks_for_it(tmp_path: Path) -> None:
    hf = Case("qwen2_moe", {"use_sliding_window": True, "sliding_window": None}).hf
    assert_parity_or_refusal(tmp_path, hf, has_head=False, chunk=None)
    with pytest.raises(ModelError, match=r"sliding_window: .* got null"):
        read_model(tmp_path)


def test_an_older_name_of_a_layer_is_refused_where_it_names_a_rope_table(tmp_path: Path) -> None:
    types = {"layer_types": ["attention", "full_attention"], "num_hidden_layers": 2}
    hf = Case("gemma4_text", types).hf
    assert_parity_or_refusal(tmp_path, hf, has_head=False, chunk=None)
    with pytest.raises(ModelError, match="layer_types: expected"):
        read_model(tmp_path)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "linear", "factor": 2.0}])
def test_older_scaling_is_refused_beside_a_table_for_each_kind_of_layer(
    scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    hf = Case("gemma4_text", {"rope_scaling": scaling}).hf
    assert_parity_or_refusal(tmp_path, hf, has_head=False, chunk=None)
    with pytest.raises(ModelError, match="rope_scaling: expected none"):
        read_model(tmp_path)


@pytest.mark.full
@settings(
    max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(**CASES)
def test_many_drawn_configurations_are_served_as_transformers_does_or_refused(
    hf: dict[str, Any], has_head: bool, chunk: int | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert_parity_or_refusal(Path(directory), hf, has_head, chunk)
