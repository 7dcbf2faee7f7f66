"""GGUF files written byte by byte: small models of a directory's numbers, right and wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

ALIGNMENT = 32

TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
"""Name -> the number of a type, how many numbers a block holds, and how many bytes it takes."""

SCALES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    "Q6_K": (208,),
}
"""Type -> the bytes at which the float16 numbers of a block begin."""

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "mixtral": "llama"}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


@frozen
class Stored:
    """A tensor of a file: the number of its type, its shape as torch has it, and its bytes."""

    type: int
    shape: Sequence[int]
    data: bytes


def write_text(text: str) -> bytes:
    """A text with its length before it."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write_value(value: Any) -> bytes:
    """A value with its type before it."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + write_text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(write_text, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def make_file(metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> bytes:
    """The bytes of a file."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += write_text(key) + write_value(value)
    data = b""
    for name, tensor in tensors.items():
        header += write_text(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.type, len(data))
        data += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
    return header + bytes(-len(header) % ALIGNMENT) + data


def make_blocks(name: str, count: int, seed: int) -> bytes:
    """Random blocks of that type, whose scales are small numbers."""
    _, _, nbytes = TYPES[name]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (count, nbytes), dtype=torch.uint8, generator=generator)
    for at in SCALES[name]:
        scales = torch.randn((count, 1), generator=generator).mul_(0.01).half()
        blocks[:, at : at + 2] = scales.view(torch.uint8)
    return blocks.numpy().tobytes()


def write_plain(tensor: Tensor, name: str) -> Stored:
    """A tensor of numbers by themselves."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    data = tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return Stored(TYPES[name][0], tuple(tensor.shape), data)


def read_stored(stored: Stored) -> Tensor:
    """What a tensor stands for, by the format's own library."""
    import gguf
    import numpy as np

    blocks = np.frombuffer(stored.data, dtype=np.uint8)
    _, numbers, nbytes = next(each for each in TYPES.values() if each[0] == stored.type)
    rows = blocks.reshape(*stored.shape[:-1], stored.shape[-1] // numbers * nbytes)
    kind = gguf.GGMLQuantizationType(stored.type)
    return torch.from_numpy(gguf.dequantize(rows, kind).copy()).reshape(tuple(stored.shape))


def pair_rows(tensor: Tensor, heads: int) -> Tensor:
    """The rows of each head in the order in which Llama's files have them."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def unpair_rows(tensor: Tensor, heads: int) -> Tensor:
    """What `pair_rows` made its result of."""
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def translate_name(name: str) -> str:
    """What GGUF calls a published tensor."""
    stem, _, end = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{end}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.{end}"


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in GGUF, where those of all experts are one."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            plain = tensor[0] if "shared_expert_gate" in name else tensor
            found[translate_name(name)] = plain
            continue
        layer, part = name.split(".")[2], name.split(".")[-2]
        stacks.setdefault(f"blk.{layer}.{EXPERTS[part]}.weight", []).append(tensor)
    return found | {name: torch.stack(parts) for name, parts in stacks.items()}


def describe(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model's configuration."""
    name = ARCHITECTURES.get(hf["model_type"], hf["model_type"])
    theta = (hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta", 10000.0))
    keys = {
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "block_count": hf["num_hidden_layers"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": hf["head_dim"],
        "attention.value_length": hf["head_dim"],
        "attention.layer_norm_rms_epsilon": float(hf.get("rms_norm_eps", 1e-6)),
        "rope.freq_base": float(theta),
        "expert_count": hf.get("num_experts", hf.get("num_local_experts")),
        "expert_used_count": hf.get("num_experts_per_tok"),
        "expert_feed_forward_length": hf.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": hf.get("shared_expert_intermediate_size"),
    }
    known = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": name, "general.alignment": ALIGNMENT, **known}


def write_gguf(
    directory: Path,
    target: Path,
    name: str = "F32",
    changes: Mapping[str, Any] | None = None,
    others: Mapping[str, Stored] | None = None,
) -> None:
    """Write the model of `directory` to the file `target`, matrices in that type.

    In `directory` the numbers are left that it stands for; of types of blocks they are random.

    changes: of the keys; None as a value takes one out
    others: more tensors
    """
    hf = json.loads((directory / "config.json").read_text())
    weights = {
        key: each.float() for key, each in load_file(directory / "model.safetensors").items()
    }
    if hf.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    is_paired = hf["model_type"] in ("llama", "mixtral")
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}
    stored: dict[str, Stored] = {}
    read: dict[str, Tensor] = {}
    for number, (key, tensor) in enumerate(stack_experts(weights).items()):
        count = heads.get(key.split(".")[-2], 0) if is_paired else 0
        kind = name if tensor.dim() > 1 and "gate_inp" not in key else "F32"
        if kind in SCALES:
            type, numbers, _ = TYPES[kind]
            data = make_blocks(kind, tensor.numel() // numbers, number)
            stored[key] = Stored(type, tuple(tensor.shape), data)
            read[key] = read_stored(stored[key])
        else:
            stored[key] = write_plain(pair_rows(tensor, count) if count else tensor, kind)
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
            read[key] = tensor.to(dtype).float()
            count = 0
        if count:
            read[key] = unpair_rows(read[key], count)
    save_file(_unstack(weights, read), directory / "model.safetensors", metadata={"format": "pt"})
    metadata = {**describe(hf), **(changes or {})}
    target.write_bytes(
        make_file(
            {key: each for key, each in metadata.items() if each is not None},
            stored | dict(others or {}),
        )
    )


def _unstack(weights: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The numbers of a file by their published names."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".experts." in name:
            layer, expert, part = name.split(".")[2], name.split(".")[-3], name.split(".")[-2]
            found[name] = read[f"blk.{layer}.{EXPERTS[part]}.weight"][int(expert)].clone()
        else:
            found[name] = read[translate_name(name)].reshape(tensor.shape).clone()
    return found


def describe_tokenizer(directory: Path, pre: str) -> dict[str, Any]:
    """The keys of the byte-level tokenizer of a directory, whose text is split by that name."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    added = {each["content"]: each for each in tokenizer["added_tokens"]}
    ids |= {content: each["id"] for content, each in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    types = [1 if each not in added else 3 if added[each]["special"] else 4 for each in tokens]
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    keys = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    named = {key: config.get(name) for key, name in keys.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": config.get("chat_template"),
        **{f"tokenizer.ggml.{key}_token_id": ids[each] for key, each in named.items() if each},
    }
