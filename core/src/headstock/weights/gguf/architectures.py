"""What a GGUF file says of a model, in the words of a config.json and of published tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from headstock.errors import shorten
from headstock.weights.gguf.header import GgufHeader, GgufTensor, HeaderError
from headstock.weights.gguf.metadata import Metadata
from headstock.weights.gguf.ropes import translate_ropes

_OUTER_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_EXPERT_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Beginnings of names -> what published checkpoints call them, `{}` being an expert."""

_MIXTRAL_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_OUTER_NAME = re.compile(r"(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"

_MAX_EXPERTS = 1 << 12

_COUNTS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
_KNOWN_KEYS = frozenset(
    (
        *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "feed_forward_length", "vocab_size"),
        *("expert_count", "expert_used_count", "expert_feed_forward_length"),
        *("expert_shared_feed_forward_length", "expert_shared_count"),
        *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
        "tensor_data_layout",
    )
)
"""Keys after the architecture's name that are read beside `_COUNTS`, or that change no number."""


@frozen
class Architecture:
    """How a GGUF architecture is called elsewhere.

    family, model_type: those of its config.json
    names: what its layers hold, in published checkpoints
    has_pairs: whether rows of queries and keys are stored in the order of pairs
    renormalizes: what `norm_topk_prob` is where it has experts; None where there is no such field
    """

    family: str
    model_type: str
    names: Mapping[str, str]
    has_pairs: bool = False
    expert_count_field: str = ""
    renormalizes: bool | None = None
    is_moe: bool = field(init=False)

    @is_moe.default
    def _has_experts(self) -> bool:
        return bool(self.expert_count_field)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _LAYER_NAMES, has_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LAYER_NAMES),
    "qwen2moe": Architecture(
        *("Qwen2MoeForCausalLM", "qwen2_moe", {**_LAYER_NAMES, **_EXPERT_NAMES}),
        expert_count_field="num_experts",
        renormalizes=False,
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _LAYER_NAMES),
    "qwen3moe": Architecture(
        *("Qwen3MoeForCausalLM", "qwen3_moe", {**_LAYER_NAMES, **_EXPERT_NAMES}),
        expert_count_field="num_experts",
        renormalizes=True,
    ),
}
"""The architectures that are read, by the name that files have for them."""

_MIXTRAL = Architecture(
    *("MixtralForCausalLM", "mixtral", {**_LAYER_NAMES, **_MIXTRAL_NAMES}),
    has_pairs=True,
    expert_count_field="num_local_experts",
)
"""Files call it llama too, and it is known by its experts."""


@frozen
class StoredTensor:
    """A tensor under its published name.

    tensor: where it lies; of a stack of experts, one alone
    heads: how many heads have the two halves of their rows as pairs; 0 where rows are in order
    """

    tensor: GgufTensor
    heads: int = 0


def find_architecture(metadata: Metadata) -> tuple[str, Architecture]:
    """Find the name of a file's architecture, and how to translate it.   raises: HeaderError"""
    name = metadata.read_text("general.architecture")
    if name not in ARCHITECTURES:
        raise HeaderError(
            f"the architecture {shorten(repr(name))} is not read from GGUF, only "
            f"{', '.join(ARCHITECTURES)} are"
        )
    is_mixtral = name == "llama" and metadata.find_count("llama.expert_count")
    return name, _MIXTRAL if is_mixtral else ARCHITECTURES[name]


def translate_config(header: GgufHeader, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """Translate a header into the fields of a config.json.

    rope_factors: the numbers of rope_freqs.weight, if the file has them
    raises: HeaderError
    """
    metadata = Metadata(header.metadata)
    name, architecture = find_architecture(metadata)
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise HeaderError("token_embd.weight is missing or no matrix, without which no model is")
    counts = {ours: metadata.read_count(f"{name}.{theirs}") for theirs, ours in _COUNTS.items()}
    layers, heads = counts["num_hidden_layers"], counts["num_attention_heads"]
    # A layer has several tensors: the count is the file's own claim.
    if layers > len(header.tensors):
        raise HeaderError(
            f"{name}.block_count is {layers}, and the file has {len(header.tensors)} tensors"
        )
    head_dim = metadata.find_count(f"{name}.attention.key_length") or counts["hidden_size"] // heads
    values_dim = metadata.find_count(f"{name}.attention.value_length")
    if values_dim not in (None, head_dim):
        raise HeaderError(
            f"{name}.attention.value_length: expected {head_dim}, as of keys, got {values_dim}"
        )
    rope_dim = metadata.find_count(f"{name}.rope.dimension_count")
    if rope_dim not in (None, head_dim):
        raise HeaderError(
            f"{name}.rope.dimension_count: expected {head_dim}, a whole head, got {rope_dim}"
        )
    known = {f"{name}.{key}" for key in (*_COUNTS, *_KNOWN_KEYS)}
    for key in header.metadata:
        # Most such settings change numbers, such as `attention.sliding_window` and `logit_scale`.
        if key.startswith(f"{name}.") and key not in known:
            raise HeaderError(
                f"{shorten(key)} is a setting that is not read, and may change what the model says"
            )
    return {
        "architectures": [architecture.family],
        "model_type": architecture.model_type,
        **counts,
        "num_key_value_heads": metadata.find_count(f"{name}.attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.read_number(f"{name}.attention.layer_norm_rms_epsilon"),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _choose_dtype(header),
        **_translate_widths(metadata, name, architecture),
        **_find_biases(header),
        **translate_ropes(metadata, name, head_dim, rope_factors),
        **_translate_tokens(metadata),
    }


def _choose_dtype(header: GgufHeader) -> str:
    """The type to compute in, as far as a file says: that of most models for packed weights."""
    stored = {each.type.name for each in header.tensors.values()}
    if stored == {"F32"}:
        return "float32"
    return "float16" if stored <= {"F32", "F16"} else "bfloat16"


def _translate_widths(
    metadata: Metadata, name: str, architecture: Architecture
) -> Mapping[str, Any]:
    """The widths of what follows attention.   raises: HeaderError"""
    if not architecture.is_moe:
        return {"intermediate_size": metadata.read_count(f"{name}.feed_forward_length")}
    count = metadata.read_count(f"{name}.expert_count")
    if count > _MAX_EXPERTS:
        raise HeaderError(f"{name}.expert_count: expected at most {_MAX_EXPERTS}, got {count}")
    dense = metadata.find_count(f"{name}.feed_forward_length")
    width = metadata.find_count(f"{name}.expert_feed_forward_length")
    shared = metadata.find_count(f"{name}.expert_shared_feed_forward_length")
    found: dict[str, Any] = {
        architecture.expert_count_field: count,
        "num_experts_per_tok": metadata.read_count(f"{name}.expert_used_count"),
    }
    if architecture.renormalizes is None:
        return found | {"intermediate_size": metadata.read_count(f"{name}.feed_forward_length")}
    found |= {"norm_topk_prob": architecture.renormalizes}
    found |= {"intermediate_size": dense or width or 0, "moe_intermediate_size": width or 0}
    return found | ({"shared_expert_intermediate_size": shared} if shared else {})


def _find_biases(header: GgufHeader) -> Mapping[str, Any]:
    """The fields for biases, of families that have these fields."""
    names = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {field: True for field, name in names.items() if name in header.tensors}


def _translate_tokens(metadata: Metadata) -> Mapping[str, Any]:
    """The tokens that begin and end texts."""
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}
    found = {ours: metadata.find_count(f"tokenizer.ggml.{key}") for ours, key in keys.items()}
    return {ours: token for ours, token in found.items() if token is not None}


def translate_tensors(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors by their published names; one that has none keeps its own.

    config: what `translate_config` made
    raises: HeaderError
    """
    _, architecture = find_architecture(Metadata(header.metadata))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, StoredTensor] = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:  # it is in the configuration
            continue
        layer, outer = _LAYER_NAME.fullmatch(name), _OUTER_NAME.fullmatch(name)
        published, stored = name, StoredTensor(tensor)
        if outer and outer[1] in _OUTER_NAMES:
            published = f"{_OUTER_NAMES[outer[1]]}.{outer[2]}"
        elif layer and layer[2] in architecture.names:
            published = f"model.layers.{int(layer[1])}.{architecture.names[layer[2]]}.{layer[3]}"
            if architecture.has_pairs and layer[2] in heads:
                stored = StoredTensor(tensor, _check_heads(name, tensor, heads[layer[2]]))
        for each, part in _split_experts(published, stored, config, architecture):
            if each in found:
                raise HeaderError(f"{shorten(name)} is a second tensor of the same place")
            found[each] = part
    return found


def _check_heads(name: str, tensor: GgufTensor, heads: int) -> int:
    """The number of heads whose rows are stored as pairs.   raises: HeaderError"""
    if tensor.shape[0] % (2 * heads):
        raise HeaderError(
            f"{shorten(name)} has {tensor.shape[0]} rows, which {heads} heads cannot share evenly"
        )
    return heads


def _split_experts(
    published: str, stored: StoredTensor, config: Mapping[str, Any], architecture: Architecture
) -> Iterator[tuple[str, StoredTensor]]:
    """The parts of a tensor, where published checkpoints have one for each expert.

    raises: HeaderError
    """
    tensor = stored.tensor
    if published.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:
        tensor = evolve(tensor, shape=(1, *tensor.shape))  # a matrix of one row
    if "{}" not in published:
        yield published, evolve(stored, tensor=tensor)
        return
    count = config[architecture.expert_count_field]
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise HeaderError(
            f"{published.replace('{}', '*')}: expected a stack of {count} matrices, got "
            f"{shorten(list(tensor.shape))}"
        )
    each = evolve(tensor, shape=tensor.shape[1:])
    for index in range(count):
        part = evolve(each, start=tensor.start + index * each.nbytes)
        yield published.replace("{}", str(index)), evolve(stored, tensor=part)
