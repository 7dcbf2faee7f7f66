"""Gated delta rules of a GGUF file: their sizes, and the order of their heads there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from headstock.errors import shorten
from headstock.weights.gguf.header import GgufHeader, HeaderError
from headstock.weights.gguf.metadata import Metadata
from headstock.weights.gguf.stored_tensor import Interleaving, StoredTensor

_SECTIONS = "rope.dimension_sections"
_DRAFTS = "nextn_predict_layers"
_COUNTS: Mapping[str, str] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim",
}
_VALUES = "ssm.inner_size"
DELTA_KEYS = (*_COUNTS, _VALUES, _SECTIONS, _DRAFTS, "full_attention_interval")
"""The keys of such architectures. Their layers' tensors say what the last one says."""


def translate_delta_rules(
    metadata: Metadata, header: GgufHeader, name: str, layers: int
) -> Mapping[str, Any]:
    """The fields for gated delta rules and for which layers have them.

    name: that of the architecture
    layers: how many there are, with those that guess further tokens
    raises: HeaderError
    """
    found: dict[str, Any] = {
        ours: metadata.read_count(f"{name}.{theirs}") for theirs, ours in _COUNTS.items()
    }
    heads, width = found["linear_num_value_heads"], metadata.read_count(f"{name}.{_VALUES}")
    if width % heads:
        raise HeaderError(
            f"{name}.{_VALUES}: expected a multiple of {name}.ssm.time_step_rank ({heads}), got "
            f"{width}"
        )
    if heads % found["linear_num_key_heads"]:
        raise HeaderError(
            f"{name}.ssm.time_step_rank: expected a multiple of {name}.ssm.group_count "
            f"({found['linear_num_key_heads']}), got {heads}"
        )
    drafts = metadata.find_count(f"{name}.{_DRAFTS}") or 0
    if drafts >= layers:
        raise HeaderError(f"{name}.{_DRAFTS}: expected less than {layers} layers, got {drafts}")
    first = f"blk.{layers - drafts}"
    # Some files leave such layers out and count them. A layer of the decoder must not pass for one.
    is_there = any(each.startswith(f"{first}.") for each in header.tensors)
    if drafts and is_there and f"{first}.nextn.eh_proj.weight" not in header.tensors:
        raise HeaderError(
            f"{name}.{_DRAFTS}: expected 0, as {first} has no nextn.eh_proj, got {drafts}"
        )
    found |= {"num_hidden_layers": layers - drafts, "mtp_num_hidden_layers": drafts}
    found["linear_value_head_dim"] = width // heads
    found["layer_types"] = [
        "full_attention" if f"blk.{layer}.attn_q.weight" in header.tensors else "linear_attention"
        for layer in range(layers - drafts)
    ]
    _check_sections(metadata, f"{name}.{_SECTIONS}")
    return found


def _check_sections(metadata: Metadata, key: str) -> None:
    """Raise HeaderError unless text has one position for all sections of a head."""
    # The first three are time, row and column of an image's part, which a token has alike.
    sections = metadata.find_numbers(key) or ()
    if len(sections) not in (0, 3, 4) or any(sections[3:]):
        raise HeaderError(
            f"{key}: expected three numbers and 0, got {shorten(str(list(sections)))}"
        )


def undo_delta_rules(
    stored: StoredTensor, part: str, config: Mapping[str, Any], *, is_tiled: bool
) -> StoredTensor:
    """A tensor, which has another order, shape or numbers if it is of a gated delta rule.

    part: what follows a layer's number in its name
    config: what `translate_delta_rules` made, among others
    is_tiled: whether the values that a key head serves lie apart
    """
    keys, dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    match part:
        case "attn_qkv.weight" | "ssm_conv1d.weight":
            order = Interleaving(2 * keys * config["linear_key_head_dim"], 1, keys, (dim,))
        case "attn_gate.weight" | "ssm_out.weight":
            order = Interleaving(0, 1, keys, (dim,))
        case "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_dt.bias" | "ssm_a":
            order = Interleaving(0, 1, keys, (1,))
        case _:
            return stored
    # The file has the first value of each key, then the second of each, and so on.
    is_tiled = is_tiled and config["linear_num_value_heads"] > keys
    if is_tiled and part == "ssm_out.weight":
        stored = evolve(stored, columns=order)
    elif is_tiled:
        stored = evolve(stored, rows=order)
    shape = stored.tensor.shape
    if part == "ssm_conv1d.weight" and len(shape) == 2:
        stored = evolve(stored, tensor=evolve(stored.tensor, shape=(shape[0], 1, shape[1])))
    return evolve(stored, is_rate=part == "ssm_a")


def join_maps(tensors: dict[str, StoredTensor], config: Mapping[str, Any]) -> None:
    """Put one map in the place of two, where checkpoints have the rows of each key head together.

    Those are its query, its key, the values that it serves and their gates. Older files have one
    map, as checkpoints have it.

    config: what `translate_delta_rules` made, among others
    writes: tensors
    raises: HeaderError
    """
    keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    order = Interleaving(0, 1, keys, (dim, dim, values, values))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.linear_attn.in_proj_"
        first, second, joined = (f"{prefix}{end}.weight" for end in ("qkv", "z", "qkvz"))
        if not {first, second} <= tensors.keys():
            continue
        if joined in tensors:
            raise HeaderError(f"layer {layer} has attn_qkv beside ssm_in, which holds it")
        parts = tensors.pop(first), tensors.pop(second)
        stored = StoredTensor(parts[0].tensor, order, second=parts[1].tensor)
        if not stored.has_whole_blocks:
            shapes = " and ".join(shorten(list(part.tensor.shape)) for part in parts)
            raise HeaderError(
                f"blk.{layer}: attn_qkv and attn_gate are {shapes}, which {keys} key heads cannot "
                "share evenly"
            )
        tensors[joined] = stored
