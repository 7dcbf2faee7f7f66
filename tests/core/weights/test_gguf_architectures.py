"""Files of each architecture, written by the format's own library, are the models they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES
from gguf_files import pair_rows
from safetensors.torch import load_file
from transformers import AutoConfig

from headstock.errors import ModelError
from headstock.weights import read_config, resolve_directory
from headstock_conformance.model.parity import computed, expected, tokens, write

LISTS = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}


def find_case(model_type: str, number: int, **changes: Any) -> dict[str, Any]:
    """A configuration of the type; None takes a field out."""
    cases = [case.hf for case in CASES if case.hf["model_type"] == model_type]
    hf = copy.deepcopy(cases[number]) | changes
    return {name: value for name, value in hf.items() if value is not None}


NO_ROPE = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0}
# What files cannot say is as in the published models.
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": find_case("gemma2", 0, **NO_ROPE, query_pre_attn_scalar=16),
    "gemma3": find_case(
        *("gemma3_text", 2),
        num_hidden_layers=7,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        rope_local_base_freq=700.0,
    ),
    "gemma3 local": find_case("gemma3_text", 0, sliding_window_pattern=6, query_pre_attn_scalar=16),
    "phi3": find_case("phi3", 0),
    "phi3 part": find_case("phi3", 1, rope_parameters=None, rope_theta=500.0),
    "phi3 long": find_case(
        *("phi3", 0),
        sliding_window=None,
        original_max_position_embeddings=16,
        rope_scaling={"type": "longrope", **LISTS},
    ),
    "granite": find_case("granite", 0, head_dim=None),
    "smollm3": find_case(
        *("smollm3", 1), num_hidden_layers=5, no_rope_layer_interval=4, rope_scaling=None
    ),
    "olmo2": find_case("olmo2", 0),
}
PAIRED, OFFSET = ("granite", "smollm3"), ("gemma2", "gemma3")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def write_settings(writer: Any, hf: Mapping[str, Any], directory: Path, *, windows: bool) -> None:
    """Write the keys of a model's configuration as the library calls them."""
    whole = AutoConfig.from_pretrained(directory)
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    head_dim = hf.get("head_dim") or width // heads
    rope = {**(hf.get("rope_parameters") or {}), **(hf.get("rope_scaling") or {})}
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(whole.num_key_value_heads)
    if "head_dim" in hf:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(whole.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", hf.get("rope_theta", 10000.0))))
    if rope.get("rope_type", "default") == "linear":
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
    settings: Mapping[str, Callable[[Any], None]] = {
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "rope_local_base_freq": writer.add_rope_freq_base_swa,
    }
    for field, add in settings.items():
        if hf.get(field) is not None and (windows or field != "sliding_window"):
            add(hf[field])
    if hf["model_type"] == "phi3" and hf.get("sliding_window") is None:
        writer.add_sliding_window(0)
    if hf["model_type"] == "phi3":
        writer.add_rope_dimension_count(int(head_dim * hf.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(hf.get("original_max_position_embeddings", 64))


def write_file(
    hf: Mapping[str, Any], directory: Path, target: Path, *, windows: bool = True
) -> None:
    """Write the model of a directory as the library and its names have it."""
    library = pytest.importorskip("gguf")
    name = {"gemma3_text": "gemma3"}.get(hf["model_type"], hf["model_type"])
    kind = next(each for each, text in library.MODEL_ARCH_NAMES.items() if text == name)
    names = library.get_tensor_name_map(kind, hf["num_hidden_layers"])
    writer = library.GGUFWriter(target, name)
    write_settings(writer, hf, directory, windows=windows)
    weights = load_file(directory / "model.safetensors")
    if hf.get("tie_word_embeddings", name.startswith("gemma")):
        weights.pop("lm_head.weight", None)
    heads = {"q_proj": hf["num_attention_heads"], "k_proj": hf.get("num_key_value_heads", 0)}
    for published, tensor in weights.items():
        module = published.split(".")[-2]
        if name in PAIRED and module in heads:
            tensor = pair_rows(tensor, heads[module])
        if name in OFFSET and published.endswith("norm.weight"):
            tensor = tensor + 1
        stored = names.get_name(published, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, tensor.float().contiguous().numpy())
    for field, stored in (("short_factor", "short"), ("long_factor", "long")):
        if numbers := (hf.get("rope_scaling") or {}).get(field):
            writer.add_tensor(f"rope_factors_{stored}.weight", torch.tensor(numbers).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.feature("R10")
@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_the_architecture_has_the_scores_of_its_model(name: str, tmp_path: Path) -> None:
    hf, prompt = MODELS[name], tokens(20)
    write(tmp_path, hf)
    write_file(hf, tmp_path, tmp_path / "small.gguf")
    found = computed(resolve_directory(str(tmp_path / "small.gguf")), prompt)

    torch.testing.assert_close(found, computed(tmp_path, prompt), atol=1e-5, rtol=0)
    torch.testing.assert_close(found, expected(tmp_path, prompt), atol=1e-4, rtol=0)


@pytest.mark.feature("R10")
def test_lists_of_factors_of_another_length_are_refused(tmp_path: Path) -> None:
    write(tmp_path, MODELS["phi3 long"])
    scaling = {"type": "longrope", **LISTS, "long_factor": [2.0, 3.0]}
    hf = MODELS["phi3 long"] | {"rope_scaling": scaling}
    write_file(hf, tmp_path, tmp_path / "small.gguf")
    with pytest.raises(ModelError, match=r"rope_factors_long.weight: expected 8 numbers, got 2"):
        resolve_directory(str(tmp_path / "small.gguf"))


@pytest.mark.feature("R10")
def test_lists_of_factors_that_were_left_out_are_missed(tmp_path: Path) -> None:
    write(tmp_path, MODELS["phi3 long"])
    hf = MODELS["phi3 long"] | {"rope_scaling": None}
    write_file(hf, tmp_path, tmp_path / "small.gguf")
    with pytest.raises(ModelError, match=r"rope_factors_short.weight and .* are missing"):
        resolve_directory(str(tmp_path / "small.gguf"))


@pytest.mark.feature("R10")
def test_an_unsaid_window_and_lists_of_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write(tmp_path, MODELS["phi3"])
    hf = MODELS["phi3"]
    write_file(hf, tmp_path, file, windows=False)
    with pytest.raises(ModelError, match=r"phi3.attention.sliding_window is missing"):
        resolve_directory(str(file))
    write(tmp_path, MODELS["olmo2"])
    write_file(MODELS["olmo2"] | {"rope_scaling": LISTS}, tmp_path, file)
    with pytest.raises(ModelError, match=r"rope_factors_long.weight is not read for .* olmo2"):
        resolve_directory(str(file))


@pytest.mark.feature("R10")
def test_queries_of_the_largest_gemma_are_scaled_by_the_width_of_heads(tmp_path: Path) -> None:
    hf = find_case("gemma2", 0, **NO_ROPE, num_hidden_layers=46, query_pre_attn_scalar=8)
    write(tmp_path, hf)
    write_file(hf, tmp_path, tmp_path / "small.gguf")
    found = read_config(resolve_directory(str(tmp_path / "small.gguf")))
    assert found["query_pre_attn_scalar"] == hf["hidden_size"] // hf["num_attention_heads"] == 8
