"""GGUF files of models with gated delta rules, in the orders and numbers that files have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
DRAFTS = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}


def list_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, after the architecture's name."""
    heads, drafts = hf["linear_num_value_heads"], hf.get("mtp_num_hidden_layers", 0)
    rope = hf.get("rope_parameters") or {}
    keys = {
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "block_count": hf["num_hidden_layers"] + drafts,
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": hf["head_dim"],
        "attention.value_length": hf["head_dim"],
        "attention.layer_norm_rms_epsilon": float(hf["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", hf.get("rope_theta", 10000.0))),
        "rope.dimension_count": int(hf["head_dim"] * hf.get("partial_rotary_factor", 0.25)),
        "rope.dimension_sections": None if is_next(hf) else [11, 11, 10, 0],
        "expert_count": hf.get("num_experts"),
        "expert_used_count": hf.get("num_experts_per_tok"),
        "expert_feed_forward_length": hf.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": hf.get("shared_expert_intermediate_size"),
        "full_attention_interval": 4,
        "nextn_predict_layers": drafts or None,
        "ssm.conv_kernel": hf.get("linear_conv_kernel_dim", 4),
        "ssm.group_count": hf["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.state_size": hf["linear_key_head_dim"],
        "ssm.inner_size": heads * hf["linear_value_head_dim"],
    }
    return {key: value for key, value in keys.items() if value is not None}


def is_next(hf: Mapping[str, Any]) -> bool:
    """Whether checkpoints have the rows of a key head together, and files values in order."""
    return bool(hf["model_type"] == "qwen3_next")


def find_parts(
    hf: Mapping[str, Any], name: str, *, is_old: bool
) -> dict[str, tuple[int, Tensor]] | None:
    """The tensors of a file that make up a published one: an axis, and its places of each there.

    is_old: whether the file is of a converter that did not divide maps
    returns: None for a tensor as it is
    """
    if not is_next(hf):
        order = find_order(hf, name)
        return {translate_name(hf, name): order} if order else None
    if is_old or not name.endswith("in_proj_qkvz.weight"):
        return None
    keys, dim = hf["linear_num_key_heads"], hf["linear_key_head_dim"]
    values = hf["linear_num_value_heads"] // keys * hf["linear_value_head_dim"]
    rows = torch.arange(keys * 2 * (dim + values)).view(keys, -1)
    q, k, v, z = (each.flatten() for each in rows.split([dim, dim, values, values], 1))
    block = translate_name(hf, name).removesuffix("ssm_in.weight")
    return {
        f"{block}attn_qkv.weight": (0, torch.cat((q, k, v))),
        f"{block}attn_gate.weight": (0, z),
    }


def find_order(hf: Mapping[str, Any], name: str) -> tuple[int, Tensor] | None:
    """The axis of value heads, and which of its places each of the file is; None without one."""
    keys, size = hf["linear_num_key_heads"], hf["linear_value_head_dim"]
    served, axis, start = hf["linear_num_value_heads"] // keys, 0, 0
    match name.split("linear_attn.")[-1].split(".")[0]:
        case "in_proj_qkv" | "conv1d":
            start = 2 * keys * hf["linear_key_head_dim"]
        case "out_proj":
            axis = 1
        case "in_proj_a" | "in_proj_b" | "dt_bias" | "A_log":
            size = 1
        case "in_proj_z":
            pass
        case _:
            return None
    heads = [key * served + value for value in range(served) for key in range(keys)]
    places = [start + head * size + place for head in heads for place in range(size)]
    return axis, torch.tensor([*range(start), *places])


def translate_name(hf: Mapping[str, Any], name: str) -> str:
    """What a file calls a published tensor, by the library's own table."""
    layers = hf["num_hidden_layers"]
    stem, _, end = name.rpartition(".")
    if stem in DRAFTS:
        return f"blk.{layers}.nextn.{DRAFTS[stem]}.{end}"
    if draft := re.match(r"mtp\.layers\.(\d+)", name):
        name = name.replace(draft[0], f"model.layers.{layers + int(draft[1])}")
    kind = next(
        each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == NAMES[hf["model_type"]]
    )
    names = gguf.get_tensor_name_map(kind, layers + hf.get("mtp_num_hidden_layers", 0))
    found = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
    assert found is not None, name
    return found


def stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, where those of all experts of a layer are one."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if expert := EXPERT.fullmatch(name):
            stacks.setdefault(expert[1] + expert[3], {})[int(expert[2])] = tensor
        else:
            found[name] = tensor
    return found | {
        name: torch.stack([parts[index] for index in range(len(parts))])
        for name, parts in stacks.items()
    }


def write_delta_rules(
    directory: Path,
    target: Path,
    kind: str = "F32",
    changes: Mapping[str, Any] | None = None,
    *,
    is_old: bool = False,
) -> None:
    """Write the model of `directory` to the file `target`, maps in that type of numbers.

    In `directory` the numbers are left that the file stands for.

    changes: of the keys after the architecture's name; None as a value takes one out
    is_old: as in `find_parts`
    """
    hf = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(target, NAMES[hf["model_type"]])
    for key, value in (list_settings(hf) | dict(changes or {})).items():
        add: Any = {list: writer.add_array, float: writer.add_float32}.get(
            type(value), writer.add_uint32
        )
        if value is not None:
            add(f"{writer.arch}.{key}", value)
    weights = load_file(directory / "model.safetensors")
    if hf.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    stacks = stack_experts(weights)
    for name, tensor in stacks.items():
        every = torch.arange(len(tensor))
        parts = find_parts(hf, name, is_old=is_old) or {translate_name(hf, name): (0, every)}
        for stored, (axis, places) in parts.items():
            part = tensor.index_select(axis, places)
            if stored.endswith("norm.weight") and "ssm_norm" not in stored:
                part = part + 1
            elif name.endswith("A_log"):
                part = -part.exp()
            numbers = part.squeeze().contiguous().numpy()
            if kind == "F32" or not (name.endswith("proj.weight") or "in_proj" in name):
                writer.add_tensor(stored, numbers)
                continue
            type_ = gguf.GGMLQuantizationType["Q4_0" if "attn_gate" in stored else kind]
            blocks = gguf.quantize(numbers, type_)
            writer.add_tensor(stored, blocks, raw_dtype=type_)
            read = torch.from_numpy(gguf.dequantize(blocks, type_).copy())
            tensor.index_copy_(axis, places, read)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in weights:
        expert = EXPERT.fullmatch(name)
        found = stacks[expert[1] + expert[3]][int(expert[2])] if expert else stacks[name]
        weights[name] = found.clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
