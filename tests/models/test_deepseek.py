"""DeepSeek-V2 and V3: what config.json may say, and what their checkpoints hold beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import YARN, Case, log_probabilities
from fp8_checkpoints import quantize_directory

from headstock.ops.torch_ops import TorchOps
from headstock.spi import LatentKV, Scoring
from headstock.startup.memory_plan import GroupTerms
from headstock.startup.weight_notes import describe_left_out
from headstock_conformance.model.parity import add_tensors, expected, tokens, write
from headstock_deepseek.families import DEEPSEEK_V2, DEEPSEEK_V3

V2, V3 = Case("deepseek_v2"), Case("deepseek_v3")
PROMPT = tokens(30)

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The fields of DeepSeek-V3."""


def test_the_published_configuration_of_v3_is_read_whole() -> None:
    config = DEEPSEEK_V3.config(PUBLISHED)

    assert config.ignored_fields == () and config.max_position == 163840
    (group,) = config.kv_groups
    assert group.layout == LatentKV(dim=576, rope_dim=64) and len(group.layers) == 61
    assert config.layers[2].experts is None
    experts = config.layers[3].experts
    assert experts is not None and experts.scoring is Scoring.SIGMOID and experts.shared == 2048
    assert (experts.groups, experts.groups_per_token, experts.group_best) == (8, 4, 2)
    # twice the factor of YaRN: 1.3689 of queries and of keys
    assert config.layers[0].scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    # a token takes 1,152 bytes a layer in 16 bits, where all keys and values would take 81,920
    page = 16 * 576 * 2
    terms = GroupTerms(group=group, num_pages=9, page_tokens=16, page_bytes=61 * page)
    assert terms.line.startswith("latent, 61 layers: 9 pages of 16, 1.1 MiB a page")
    names = DEEPSEEK_V3.params(config)
    assert names["layers.7.k_up"].shape == (128, 512, 128)
    assert names["layers.7.v_up"].shape == (128, 128, 512)
    assert names["layers.7.router"].dtype == "float32"


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (V2, {"topk_method": "noaux_tc"}, "topk_method: expected .* got 'noaux_tc'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob: expected .* got true"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func: expected .* got 'sigmoid'"),
        (V2, {"rope_interleave": True}, "rope_interleave: expected .* got true"),
        (V2, {"num_key_value_heads": 2}, "num_key_value_heads: expected 4, .* got 2"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1, got 2"),
        (V2, {"num_experts_per_tok": 9}, "num_experts_per_tok: expected .* 8, got 9"),
        (V2, {"n_shared_experts": -1}, "n_shared_experts: expected 0 .* got -1"),
        (V2, {"qk_rope_head_dim": 7}, "qk_rope_head_dim: expected .* even .* got 7"),
        (
            V2,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 0.7}},
            "mscale_all_dim: expected .* 'yarn', got 0.7 with 'linear'",
        ),
        (V3, {"topk_method": "greedy"}, "topk_method: expected .* got 'greedy'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func: expected .* got 'softmax'"),
        (V3, {"head_dim": 20}, "head_dim: expected 8, got 20"),
        (V3, {"n_group": 5}, "n_group: expected .* 12 experts .* got 5"),
        (V3, {"n_group": 12}, "n_group: expected .* at least 2, got 12"),
        (V3, {"topk_group": 5}, "topk_group: expected .* 4 groups.* got 5"),
        (V3, {"num_experts_per_tok": 7}, "topk_group: expected .* 7 experts .* got 2"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank: expected .* got 0"),
        (V3, {"first_k_dense_replace": None}, "first_k_dense_replace: expected .* got null"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(
    case: Case, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        case.family.config({**case.hf, **changes})


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, V3.hf)
    before = log_probabilities(tmp_path, DEEPSEEK_V3, PROMPT, TorchOps())
    extra = ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight", "mtp.0.proj.weight")
    add_tensors(tmp_path, {name: torch.full((2, 3), float("nan")) for name in extra})

    assert torch.equal(log_probabilities(tmp_path, DEEPSEEK_V3, PROMPT, TorchOps()), before)
    (said,) = describe_left_out(tmp_path, DEEPSEEK_V3, DEEPSEEK_V3.config(V3.hf))
    assert said.startswith("3 tensors left out")
    assert "model.layers.3.eh_proj.weight, ..." in said


@pytest.mark.parametrize("case", [V2, V3], ids=str)
def test_the_absorbed_matrices_are_made_of_block_fp8(case: Case, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    write(plain, case.hf)
    # Blocks that neither heads nor ranks are multiples of.
    quantize_directory(plain, packed, (16, 9))

    ours = log_probabilities(packed, case.family, PROMPT, TorchOps(), 11)
    torch.testing.assert_close(ours, expected(plain, PROMPT), atol=1e-4, rtol=0)


def test_a_yarn_without_mscale_all_dim_scales_the_rotations_alone() -> None:
    table = {name: value for name, value in YARN.items() if name != "mscale_all_dim"}
    config = DEEPSEEK_V2.config({**V2.hf, "rope_scaling": table})

    assert config.layers[0].scale == pytest.approx(20**-0.5)
