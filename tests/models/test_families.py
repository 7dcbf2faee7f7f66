"""Families over the one decoder by data alone: the log-probabilities of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from families import BESIDE_MLP, FAMILIES, GRANITE_FACTORS, NESTED, NEW, Case, log_probabilities
from family_cases import CASES
from often import often
from packed_ops import PackedOps
from transformers import AutoConfig, AutoModelForCausalLM

from headstock.nn.config_keys import UNSERVED
from headstock.ops.fbgemm_ops import FbgemmOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Ops, QueryScale
from headstock.weights import read_config
from headstock_conformance.model.parity import expected, tokens, write

PROMPT = tokens(40)
Way = tuple[type[Ops], int | None]
WAYS: tuple[Way, ...] = ((TorchOps, 7), (TorchOps, None), (PackedOps, 7), (FbgemmOps, None))
FIRST = {case.model_type: case for case in reversed(CASES)}
"""The first case of each family: it is computed in all ways by default, others in one."""


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        *((case, WAYS if case in FIRST.values() else WAYS[:1]) for case in CASES),
        *often(0, [(case, WAYS[1:]) for case in CASES if case not in FIRST.values()]),
    ],
    ids=lambda each: str(each) if isinstance(each, Case) else f"{len(each)} ways",
)
def test_log_probabilities_are_those_of_transformers(
    case: Case, ways: tuple[Way, ...], tmp_path: Path
) -> None:
    write(tmp_path, case.hf)
    theirs = expected(tmp_path, PROMPT)

    for ops, chunk in ways:
        ours = log_probabilities(tmp_path, case.family, PROMPT, ops(), chunk)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=lambda m: f"{ops}: {m}")  # noqa: B023


PARTIAL = {"rope_type": "proportional", "rope_theta": 9.0}
NULLS = (
    Case("deepseek_v3", {"norm_topk_prob": None}),
    Case("deepseek_v3", {"rope_interleave": None}),
    Case("gemma3_text", {"partial_rotary_factor": None}),
    Case("lfm2", {"hidden_act": None}),
    Case("ernie4_5", {"use_bias": None}),
    Case("granite", {"num_key_value_heads": None}),
)


@pytest.mark.parametrize("case", NULLS, ids=str)
def test_nulls_are_read_as_transformers_reads_them(case: Case, tmp_path: Path) -> None:
    write(tmp_path, case.hf)

    ours = log_probabilities(tmp_path, case.family, PROMPT, TorchOps())
    torch.testing.assert_close(ours, expected(tmp_path, PROMPT), atol=1e-4, rtol=0)


WINDOWED = {
    *("gemma2", "gemma3_text", "phi3", "mixtral", "smollm3", "qwen2_moe"),
    *("olmo3", "exaone4", "ministral3", "gpt_oss", "gemma4_text", "gemma4_unified_text"),
}
SPARSE = {"qwen3_5_moe_text", "mixtral", "minimax_m2", "granitemoe", "granitemoeshared", "gpt_oss"}
"""Families with experts in all layers; `MIXED` have them in some."""
MIXED = {
    *("ernie4_5_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    *("hy_v3", "lfm2_moe", "gemma4_text", "qwen3_next"),
}
BIASED = {
    *("gemma2", "gemma3_text", "granite", "smollm3", "olmo2", "ernie4_5", "seed_oss"),
    *("qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3", "olmo3"),
    *("granitemoe", "granitemoeshared", "gpt_oss", "gemma4_text", "gemma4_unified_text"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
}
RECENT = {"gemma4_text", "gemma4_unified_text"}
"""Families without the spellings before transformers 5."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_cases_leave_nothing_of_a_family_neutral(model_type: str) -> None:
    cases = [case for case in CASES if case.model_type == model_type]
    configs = [case.family.config(case.hf) for case in cases]

    # The spellings of rope before and after transformers 5.
    assert any("rope_parameters" in case.changes for case in cases)
    has_older = any({"rope_theta", "rope_scaling"} & case.changes.keys() for case in cases)
    assert has_older == (model_type not in RECENT)
    assert {config.tied_embeddings for config in configs} == {False, True}
    assert any(64 <= config.head_dim <= 256 for config in configs)
    biases = {(each.qkv_bias, each.out_bias, each.mlp_bias) for each in configs}
    assert (biases > {(False, False, False)}) == (model_type in BIASED)
    windows = {layer.window for config in configs for layer in config.layers}
    assert (windows > {None}) == (model_type in WINDOWED)
    assert all(window is None or window < len(PROMPT) for window in windows)
    # What layers may be, they are, in one model or another.
    kinds = {layer.experts is None for config in configs for layer in config.layers}
    assert kinds == (
        {False} if model_type in SPARSE else {False, True} if model_type in MIXED else {True}
    )


@pytest.mark.parametrize("model_type", often(3, reversed(FAMILIES)))
def test_what_transformers_saves_again_in_parts_is_read_alike(
    model_type: str, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.model_type == model_type)
    write(tmp_path, case.hf)
    before = log_probabilities(tmp_path, case.family, PROMPT, TorchOps())
    again = tmp_path / "again"

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.save_pretrained(again, max_shard_size="30KB")

    assert len(list(again.glob("*.safetensors"))) > 1
    after = log_probabilities(again, case.family, PROMPT, TorchOps())
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    assert case.family.config(read_config(again)).ignored_fields == ()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case("gemma2", {"use_bidirectional_attention": True}),
            "use_bidirectional_attention: expected .* got true",
        ),
        (
            Case("gemma2", {"attn_logit_softcapping": 0}),
            "attn_logit_softcapping: expected .* got 0",
        ),
        (Case("gemma2", {"hidden_activation": "relu"}), "hidden_activation: .* got 'relu'"),
        *(
            (
                Case(kind, {"sliding_window": None, "layer_types": types}),
                "sliding_window: .* got null",
            )
            for kind in ("gemma2", "gemma3_text")
            for types in (None, ["full_attention"] * 3)
        ),
        (
            Case("gemma3_text", {"rope_parameters": {"rope_type": "default"}}),
            "expected a table for",
        ),
        (
            Case("gemma3_text", {"rope_parameters": {}, "rope_scaling": {}}),
            "rope_scaling has no rope_parameters.full_attention to scale",
        ),
        (
            Case("gemma3_text", {"rope_scaling": "linear"}),
            "rope_scaling: expected a table, got 'linear'",
        ),
        (
            Case("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
            "full_attention: expected 'rope_type', got only 'type'",
        ),
        (Case("gemma3_text", {"partial_rotary_factor": 0.5}), "partial_rotary_factor: .* got 0.5"),
        (
            Case("gemma3_text", {"layer_types": ["attention"] * 3}),
            "layer_types: .* got 'attention'",
        ),
        *(
            (Case("gemma4_text", changes), message)
            for changes, message in (
                (
                    {"hidden_size_per_layer_input": 256},
                    "hidden_size_per_layer_input: expected 0, got 256; .*E2B, E4B.* is not served",
                ),
                ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: expected 0, got 2; .*E2B"),
                ({"use_bidirectional_attention": "all"}, "expected null or 'vision', got 'all'"),
                ({"per_layer_config": {"3": {}}}, "per_layer_config: .* layers below 3, got"),
                ({"per_layer_config": [1]}, r"per_layer_config: expected a table .* got '\[1\]'"),
                (
                    {"per_layer_config": {"1": {"intermediate_size": 9}}},
                    "per_layer_config.1: expected head_dim and num_key_value_heads, got",
                ),
                (
                    {"per_layer_config": {"0": {"head_dim": 8}}},
                    "one head_dim for all layers of a kind, got 8 and 16",
                ),
                (
                    {"per_layer_config": {"0": {"num_key_value_heads": 3}}},
                    r"num_key_value_heads of layer 0: expected a divisor .* \(4\), got 3",
                ),
                ({"per_layer_config": {"0": {"head_dim": 0}}}, "head_dim: .* above 0, got 0"),
                (
                    {"rope_parameters": {"full_attention": {}}},
                    "rope_parameters: expected a table for each of full_attention, sliding_atten",
                ),
                (
                    {"rope_parameters": {**NESTED, "full_attention": {**PARTIAL, "factor": 0}}},
                    "factor: expected a number above 0, got 0",
                ),
                (
                    {
                        "rope_parameters": {
                            **NESTED,
                            "full_attention": {**PARTIAL, "partial_rotary_factor": 1.5},
                        }
                    },
                    "partial_rotary_factor: expected above 0 and at most 1, got 1.5",
                ),
                (
                    {**BESIDE_MLP, "top_k_experts": 7},
                    r"top_k_experts: expected at most num_experts \(6\), got 7",
                ),
                ({**BESIDE_MLP, "num_experts": None}, "num_experts: .* got null"),
                ({"sliding_window": None}, "sliding_window: .* got null"),
            )
        ),
        (
            Case("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
            "rope_type: .* got 'linear'",
        ),
        (
            Case("phi3", {"rope_scaling": {"type": "longrope"}}),
            "short_factor: expected a list .* got null",
        ),
        (
            Case("phi3", {"partial_rotary_factor": 0.2}),
            "partial_rotary_factor: .* even .* 16 .* got 0.2, which rotates 3",
        ),
        (Case("phi3", {"partial_rotary_factor": None}), "partial_rotary_factor: .* got null"),
        (
            Case("mixtral", {"num_experts_per_tok": 9}),
            "num_experts_per_tok: expected at most .* got 9",
        ),
        (Case("granite", {"logits_scaling": 0}), "logits_scaling: expected .* got 0"),
        (
            Case("granite", {"residual_multiplier": None}),
            "residual_multiplier: expected .* got null",
        ),
        (Case("smollm3", {"no_rope_layers": [1]}), r"no_rope_layers: expected 3 .* got '\[1\]'"),
        (Case("olmo2", {"clip_qkv": 3.0}), "clip_qkv: .* got 3.0"),
        (Case("ernie4_5_moe", {"use_bias": True}), "use_bias: expected false, got true"),
        (
            Case("ernie4_5_moe", {"moe_num_shared_experts": -1}),
            "moe_num_shared_experts: expected 0 .* got -1",
        ),
        (
            Case("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}),
            "sliding_window: expected a width",
        ),
        (Case("lfm2", {"full_attn_idxs": [3]}), r"full_attn_idxs: expected .* got '\[3\]'"),
        (Case("qwen2_moe", {"decoder_sparse_step": 0}), "decoder_sparse_step: expected .* got 0"),
        (Case("qwen2_moe", {"mlp_only_layers": 3}), "mlp_only_layers: expected a list .* got 3"),
        (Case("lfm2", {"full_attn_idxs": []}), "full_attn_idxs: expected .* 'full_attention'"),
        (
            Case("lfm2", {"conv_dim": 16}),
            "conv_dim: expected 32, .* hidden_size, got 16",
        ),
        (Case("lfm2", {"use_pos_enc": False}), "use_pos_enc: expected true, got false"),
        (Case("lfm2", {"hidden_act": "gelu"}), "hidden_act: expected silu, got 'gelu'"),
        (
            Case("lfm2_moe", {"num_experts_per_tok": 7}),
            "num_experts_per_tok: expected at most .* got 7",
        ),
        (Case("glm4_moe_lite", {"first_k_dense_replace": 2}), "first_k_dense_replace: .* got 2"),
        (Case("glm4_moe_lite", {"mlp_layer_types": ["dense"]}), "mlp_layer_types: expected 3 ent"),
        (Case("hy_v3", {"qk_norm": False}), "qk_norm: expected true, got false"),
        (Case("hy_v3", {"expert_hidden_dim": 24}), "expert_hidden_dim: expected 20, got 24"),
        (Case("minimax_m2", {"scoring_func": "softmax"}), "scoring_func: .* got 'softmax'"),
        (Case("minimax_m2", {"rotary_dim": 18}), "rotary_dim: expected an even .* got 18"),
        (Case("olmo3", NEW), "rope_parameters: expected a table for each of full_attention, slid"),
        (Case("exaone4", {"sliding_window_pattern": "LX"}), "sliding_window_pattern: .* got 'LX'"),
        (Case("exaone4", {"sliding_window": None}), "layer_types: .* got none"),
        (Case("olmo3", {"sliding_window": None}), "sliding_window: .* got null"),
        (Case("exaone4", {"sliding_window_pattern": 0}), "sliding_window_pattern: .* got 0"),
        (
            Case("granitemoeshared", {"shared_intermediate_size": -1}),
            "shared_intermediate_size: expected a width, or 0, got -1",
        ),
        (Case("ministral3", NEW), "rope_parameters: expected .* llama_4_scaling_beta"),
        *(
            (Case("qwen3_next", changes), message)
            for changes, message in (
                ({"num_experts": 0}, "num_experts: expected a number above 0, got 0"),
                ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most 6, got 7"),
                ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected .* got 0"),
                ({"mlp_only_layers": 1}, "mlp_only_layers: expected a list .* got 1"),
                ({"linear_num_value_heads": 3}, r"linear_num_value_heads: .* \(2\), got 3"),
                ({"layer_types": ["linear_attention"] * 3}, "layer_types: expected full_attent"),
                ({"rope_scaling": {"type": "mrope"}}, "rope_type: .* got 'mrope'"),
            )
        ),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        case.family.config(case.hf)


def test_sizes_by_layer_are_those_of_kinds_of_layers() -> None:
    changes = {"num_hidden_layers": 12, "attention_k_eq_v": True, "sliding_window": 5}
    kinds = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    sizes = {"head_dim": 32, "num_key_value_heads": 1}
    by_kind, by_layer = (
        (case := Case("gemma4_text", {**changes, **more})).family.config(case.hf)
        for more in (kinds, {"per_layer_config": {"05": sizes, "11": sizes}})
    )

    assert by_kind.layers == by_layer.layers
    assert [group.layers for group in by_kind.kv_groups] == [
        (5, 11),
        (0, 1, 2, 3, 4, 6, 7, 8, 9, 10),
    ]


def test_letters_say_which_layers_have_windows() -> None:
    case = Case("exaone4", {"sliding_window_pattern": "LLG", "sliding_window": 5})
    config = case.family.config({**case.hf, "num_hidden_layers": 4})

    assert [layer.window for layer in config.layers] == [5, 5, None, 5]
    assert [layer.rope for layer in config.layers] == [0, 0, None, 0]


def test_no_window_is_no_pattern_whatever_it_says() -> None:
    fields = {"sliding_window": None, "sliding_window_pattern": "LLLG"}
    case = Case("exaone4", {**fields, "layer_types": ["full_attention"] * 3})
    config = case.family.config(case.hf)

    assert {(layer.window, layer.rope) for layer in config.layers} == {(None, 0)}


@pytest.mark.parametrize("beta", [0.1, 0])
def test_ministral_3_serves_all_its_positions_whether_its_queries_grow_or_not(beta: float) -> None:
    table = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 48,
        "llama_4_scaling_beta": beta,
    }
    case = Case("ministral3", {"rope_parameters": table})
    config = case.family.config(case.hf)

    assert config.max_position == 64
    assert config.query_scale == (QueryScale(rate=beta, length=48) if beta else None)


SERVED = {
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"},
    "gemma3_text": {
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
        "rope_local_base_freq",
    },
    "gemma4_text": {"final_logit_softcapping"},
    "gemma4_unified_text": {"final_logit_softcapping"},
    "granite": GRANITE_FACTORS.keys(),
    "granitemoe": GRANITE_FACTORS.keys(),
    "granitemoeshared": GRANITE_FACTORS.keys(),
    "smollm3": {"sliding_window"},
    "qwen2_moe": {"sliding_window"},
    "deepseek_v2": {"routed_scaling_factor", "n_group", "topk_group"},
    "deepseek_v3": {"routed_scaling_factor"},
    "glm4_moe": {"routed_scaling_factor"},
    "glm4_moe_lite": {"routed_scaling_factor"},
    "lfm2_moe": {"routed_scaling_factor"},
}
"""What these families read of that which others refuse; two have no window by default, and one
groups its experts only by another method.
"""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_changes_the_numbers_is_read_or_refused(model_type: str) -> None:
    (architecture, family), case = FAMILIES[model_type], Case(model_type)

    def refuses(name: str) -> bool:
        try:
            family.config({**case.hf, name: 7.5})
        except ValueError as error:
            return str(error).startswith(name)
        return False

    assert {name for name in UNSERVED if not refuses(name)} == SERVED.get(model_type, set())
    with pytest.raises(ValueError, match=f"model_type: .* for {architecture}, got "):
        family.config({**case.hf, "model_type": "llama"})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_that_transformers_writes_of_a_configuration_is_known(model_type: str) -> None:
    for case in (case for case in CASES if case.model_type == model_type):
        whole = AutoConfig.for_model(**deepcopy(case.hf)).to_json_string(use_diff=False)
        assert case.family.config(json.loads(whole)).ignored_fields == ()
