"""What a GGUF file says of a model, in the words of a config.json and of published tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve

from headstock.errors import shorten
from headstock.weights.gguf.architecture_table import (
    ARCHITECTURES,
    MIXTRAL,
    OUTER_NAMES,
    WINDOW,
    Architecture,
)
from headstock.weights.gguf.delta_rules import (
    DELTA_KEYS,
    join_maps,
    translate_delta_rules,
    undo_delta_rules,
)
from headstock.weights.gguf.header import GgufHeader, HeaderError
from headstock.weights.gguf.metadata import Metadata
from headstock.weights.gguf.ropes import ATTENTION_FACTOR, FACTORS, translate_ropes
from headstock.weights.gguf.stored_tensor import Interleaving, StoredTensor

_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.([\w.]+)")
_ENDINGS = ("weight", "bias")
_OUTER_NAME = re.compile(r"(\w+)\.(weight|bias)")
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


def find_architecture(metadata: Metadata) -> tuple[str, Architecture]:
    """Find the name of a file's architecture, and how to translate it.   raises: HeaderError"""
    name = metadata.read_text("general.architecture")
    if name not in ARCHITECTURES:
        raise HeaderError(
            f"the architecture {shorten(repr(name))} is not read from GGUF, only "
            f"{', '.join(ARCHITECTURES)} are"
        )
    is_mixtral = name == "llama" and metadata.find_count("llama.expert_count")
    return name, MIXTRAL if is_mixtral else ARCHITECTURES[name]


def translate_config(
    header: GgufHeader, rope_factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Translate a header into the fields of a config.json.

    rope_factors: the numbers of those of `FACTORS` that the file has
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
    head_dim = metadata.find_size(f"{name}.attention.key_length") or counts["hidden_size"] // heads
    values_dim = metadata.find_count(f"{name}.attention.value_length")
    if values_dim not in (None, head_dim):
        raise HeaderError(
            f"{name}.attention.value_length: expected {head_dim}, as of keys, got {values_dim}"
        )
    rope_dim = metadata.find_size(f"{name}.rope.dimension_count") or head_dim
    if rope_dim != head_dim and not architecture.turns_part:
        raise HeaderError(
            f"{name}.rope.dimension_count: expected {head_dim}, a whole head, got {rope_dim}"
        )
    _check_keys(header, name, architecture)
    has_lists = architecture.has_factor_lists
    config = {
        "architectures": [architecture.family],
        "model_type": architecture.model_type,
        **counts,
        "num_key_value_heads": metadata.find_size(f"{name}.attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.read_number(f"{name}.attention.layer_norm_rms_epsilon"),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _choose_dtype(header),
        **_translate_widths(metadata, name, architecture),
        **_find_biases(header),
        **_translate_settings(metadata, name, architecture, counts, head_dim),
        **translate_ropes(metadata, name, head_dim, rope_dim, rope_factors, has_lists=has_lists),
        **_translate_tokens(metadata),
    }
    if architecture.has_delta_rules:
        config |= translate_delta_rules(metadata, header, name, layers)
    return config


def _check_keys(header: GgufHeader, name: str, architecture: Architecture) -> None:
    """Raise HeaderError for a setting of the architecture that is not read."""
    known = {*_COUNTS, *_KNOWN_KEYS, *architecture.settings}
    known |= {ATTENTION_FACTOR} if architecture.has_factor_lists else set()
    known |= set(DELTA_KEYS) if architecture.has_delta_rules else set()
    for key in header.metadata:
        # Most such settings change numbers, such as `attention.sliding_window` and `logit_scale`.
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known:
            raise HeaderError(
                f"{shorten(key)} is a setting that is not read, and may change what the model says"
            )
    # Older files lack it, and programs that read them guessed the window.
    window = f"{name}.{WINDOW}"
    if WINDOW in architecture.settings and window not in header.metadata:
        raise HeaderError(f"{window} is missing, without which its layers' windows are not known")


def _translate_settings(
    metadata: Metadata,
    name: str,
    architecture: Architecture,
    counts: Mapping[str, int],
    head_dim: int,
) -> Mapping[str, Any]:
    """The fields that the architecture alone has.   raises: HeaderError"""
    found = dict(architecture.fields)
    for theirs, ours in architecture.settings.items():
        number = metadata.find_number(f"{name}.{theirs}")
        if theirs == WINDOW:
            found[ours] = metadata.find_count(f"{name}.{theirs}") or None
        elif number is not None:
            found[ours] = number
    if architecture.scaled_layers:
        is_scaled = counts["num_hidden_layers"] == architecture.scaled_layers
        width = counts["hidden_size"] // counts["num_attention_heads"]
        found["query_pre_attn_scalar"] = width if is_scaled else head_dim
    return found


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
    if not architecture.expert_width_field:
        return found | {"intermediate_size": metadata.read_count(f"{name}.feed_forward_length")}
    if architecture.renormalizes is not None:
        found["norm_topk_prob"] = architecture.renormalizes
    found |= {"intermediate_size": dense or width or 0, architecture.expert_width_field: width or 0}
    return found | ({"shared_expert_intermediate_size": shared} if shared else {})


def _find_biases(header: GgufHeader) -> Mapping[str, Any]:
    """The fields for biases, of families that have these fields."""
    names = {"attention_bias": ".attn_output.bias", "mlp_bias": ".ffn_up.bias"}
    return {
        field: True
        for field, name in names.items()
        if any(each.endswith(name) for each in header.tensors)
    }


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
    found: dict[str, StoredTensor] = {}
    for name, tensor in header.tensors.items():
        if name in FACTORS:  # they are in the configuration
            continue
        layer = _LAYER_NAME.fullmatch(name)
        stored = StoredTensor(tensor)
        if layer and architecture.has_pairs:
            stored = _undo_pairs(stored, layer[2], config)
        if layer and architecture.has_delta_rules:
            stored = undo_delta_rules(
                stored, layer[2], config, is_tiled=architecture.has_tiled_values
            )
        if not stored.has_whole_blocks:
            shape = f"{shorten(list(tensor.shape))} in {tensor.type.name}"
            raise HeaderError(f"{shorten(name)} is {shape}, which its heads cannot share evenly")
        # Of such architectures, this norm alone is stored as it is.
        if architecture.has_offset and name.endswith("norm.weight") and ".ssm_" not in name:
            stored = evolve(stored, offset=-1)
        published = _find_published_name(name, config, architecture)
        for each, part in _split_experts(published, stored, config, architecture):
            if each in found:
                raise HeaderError(f"{shorten(name)} is a second tensor of the same place")
            found[each] = part
    if architecture.has_delta_rules and not architecture.has_tiled_values:
        join_maps(found, config)
    return found


def _find_published_name(name: str, config: Mapping[str, Any], architecture: Architecture) -> str:
    """What published checkpoints call a tensor, with `{}` for an expert; else its own name."""
    if outer := _OUTER_NAME.fullmatch(name):
        return f"{OUTER_NAMES[outer[1]]}.{outer[2]}" if outer[1] in OUTER_NAMES else name
    layer = _LAYER_NAME.fullmatch(name)
    if layer is None:
        return name
    index, part, names = int(layer[1]), layer[2], architecture.names
    stem, _, end = part.rpartition(".")
    first_draft = config["num_hidden_layers"]
    if index == first_draft and stem in architecture.draft_names:
        return f"{architecture.draft_names[stem]}.{end}"
    prefix = f"model.layers.{index}."
    if 0 <= index - first_draft < config.get("mtp_num_hidden_layers", 0):
        prefix = f"mtp.layers.{index - first_draft}."
    if part in names:
        return prefix + names[part]
    return f"{prefix}{names[stem]}.{end}" if stem in names and end in _ENDINGS else name


def _undo_pairs(stored: StoredTensor, part: str, config: Mapping[str, Any]) -> StoredTensor:
    """Queries and keys, of whose heads the halves of the rows take turns.

    part: what follows a layer's number in the tensor's name
    """
    fields = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    field = fields.get(part.partition(".")[0])
    return evolve(stored, rows=Interleaving(0, config[field], 2, (1,))) if field else stored


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
