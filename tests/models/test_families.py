"""Families over the one decoder by data alone: the log-probabilities of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from families import CASES, FAMILIES, Case, log_probabilities
from packed_ops import PackedOps
from transformers import AutoConfig, AutoModelForCausalLM

from headstock.nn.config_keys import UNSERVED
from headstock.ops.fbgemm_ops import FbgemmOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Ops
from headstock.weights import read_config
from headstock_conformance.model.parity import expected, tokens, write

PROMPT = tokens(40)
WAYS: tuple[tuple[type[Ops], int | None], ...] = (
    (TorchOps, None),
    (TorchOps, 7),
    (PackedOps, 7),
    (FbgemmOps, None),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probabilities_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    write(tmp_path, case.hf)
    theirs = expected(tmp_path, PROMPT)

    for ops, chunk in WAYS:
        ours = log_probabilities(tmp_path, case.family, PROMPT, ops(), chunk)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=lambda m: f"{ops}: {m}")  # noqa: B023


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


WINDOWED = {"gemma2", "gemma3_text", "phi3", "mixtral", "smollm3", "qwen2_moe"}
BIASED = {
    *("gemma2", "gemma3_text", "granite", "smollm3", "olmo2", "ernie4_5", "seed_oss"),
    *("qwen2_moe", "deepseek_v2", "deepseek_v3"),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_cases_leave_nothing_of_a_family_neutral(model_type: str) -> None:
    cases = [case for case in CASES if case.model_type == model_type]
    configs = [case.family.config(case.hf) for case in cases]

    # The spellings of rope before and after transformers 5.
    assert any("rope_parameters" in case.changes for case in cases)
    assert any({"rope_theta", "rope_scaling"} & case.changes.keys() for case in cases)
    assert {config.tied_embeddings for config in configs} == {False, True}
    assert any(64 <= config.head_dim <= 256 for config in configs)
    biases = {(each.qkv_bias, each.out_bias, each.mlp_bias) for each in configs}
    assert (biases > {(False, False, False)}) == (model_type in BIASED)
    windows = {layer.window for config in configs for layer in config.layers}
    assert (windows > {None}) == (model_type in WINDOWED)
    assert all(window is None or window < len(PROMPT) for window in windows)
    # What layers may be, they are, in one model or another.
    assert {layer.experts is None for config in configs for layer in config.layers} == {
        "mixtral": {False},
        "ernie4_5_moe": {False, True},
        "qwen2_moe": {False, True},
        "deepseek_v2": {False, True},
        "deepseek_v3": {False, True},
    }.get(model_type, {True})


@pytest.mark.parametrize("model_type", FAMILIES)
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
        (Case("gemma2", {"use_bidirectional_attention": True}), "use_bidirectional_attention is"),
        (Case("gemma2", {"attn_logit_softcapping": 0}), "attn_logit_softcapping is 0, expected"),
        (Case("gemma2", {"hidden_activation": "relu"}), "hidden_activation is 'relu', which is"),
        *(
            (Case(kind, {"sliding_window": None, "layer_types": types}), "sliding_window is null")
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
            "rope_scaling is 'linear', expected a table",
        ),
        (
            Case("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
            "the rope of full attention has 'type' without 'rope_type'",
        ),
        (Case("gemma3_text", {"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5, but"),
        (Case("gemma3_text", {"layer_types": ["attention"] * 3}), "layer_types has 'attention'"),
        (
            Case("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
            "rope_type is 'linear'",
        ),
        (
            Case("phi3", {"rope_scaling": {"type": "longrope"}}),
            "short_factor is null, expected a list",
        ),
        (Case("phi3", {"partial_rotary_factor": 0.2}), "turns 3 of 16"),
        (Case("phi3", {"partial_rotary_factor": None}), "partial_rotary_factor is null"),
        (Case("mixtral", {"num_experts_per_tok": 9}), "num_experts_per_tok is 9, expected at most"),
        (Case("granite", {"logits_scaling": 0}), "logits_scaling is 0, expected a number above 0"),
        (Case("granite", {"residual_multiplier": None}), "residual_multiplier is null, expected"),
        (Case("smollm3", {"no_rope_layers": [1]}), "no_rope_layers is '[1]', expected 3 entries"),
        (Case("olmo2", {"clip_qkv": 3.0}), "clip_qkv is 3.0, which is not supported"),
        (Case("ernie4_5_moe", {"use_bias": True}), "use_bias is true, which is not supported"),
        (
            Case("ernie4_5_moe", {"moe_num_shared_experts": -1}),
            "moe_num_shared_experts is -1, expected a number of experts",
        ),
        (Case("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}), "but there is no window"),
        (Case("lfm2", {"full_attn_idxs": [3]}), "full_attn_idxs is '[3]', expected a list of"),
        (Case("lfm2", {"full_attn_idxs": []}), "no layer is of type 'full_attention'"),
        (
            Case("lfm2", {"conv_dim": 16}),
            "conv_dim is 16, but hidden_size is 32; expected the same",
        ),
        (Case("lfm2", {"use_pos_enc": False}), "use_pos_enc is false, which is not supported"),
        (Case("lfm2", {"hidden_act": "gelu"}), "hidden_act is 'gelu', but LFM2 only has 'silu'"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        case.family.config(case.hf)

    assert message in str(error.value)


SERVED = {
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"},
    "gemma3_text": {
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
        "rope_local_base_freq",
    },
    "granite": {
        *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
        "logits_scaling",
    },
    "smollm3": {"sliding_window"},
    "qwen2_moe": {"sliding_window"},
    "deepseek_v2": {"routed_scaling_factor", "n_group", "topk_group"},
    "deepseek_v3": {"routed_scaling_factor"},
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
    with pytest.raises(ValueError, match=f"but the architecture is {architecture}"):
        family.config({**case.hf, "model_type": "llama"})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_that_transformers_writes_of_a_configuration_is_known(model_type: str) -> None:
    for case in (case for case in CASES if case.model_type == model_type):
        whole = AutoConfig.for_model(**deepcopy(case.hf)).to_json_string(use_diff=False)
        assert case.family.config(json.loads(whole)).ignored_fields == ()
