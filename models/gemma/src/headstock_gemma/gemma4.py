"""Read config.json of Gemma-4: heads, their width and positions differ between kinds of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from headstock.nn.config_fields import (
    Json,
    quoted,
    read_bias,
    read_flag,
    read_positive,
    read_whole,
    without_nulls,
)
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_activation,
    read_cap,
    read_layer_count,
    read_layer_types,
    windows_by_type,
)
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import ANY_HEAD, ignored_rope_fields, read_rope
from headstock.nn.rope_config import FIELDS as ROPE_FIELDS
from headstock.nn.text_decoder import text_decoder
from headstock.spi import Experts, Head, LayerSizes, ModelConfig, QkNorm, Rope

NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    router="router.proj",
    expert="experts.{}.",
    whole_gate_up="experts.gate_up_proj",
    whole_down="experts.down_proj",
)

TEXT_DEFAULTS: Json = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "eos_token_id": 1,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
UNIFIED_DEFAULTS: Json = {
    **TEXT_DEFAULTS,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
"""Published files omit fields with the defaults of these transformers classes."""

FIELDS = (
    *("hidden_activation", "sliding_window", "attention_bias", "final_logit_softcapping"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"),
    *("use_bidirectional_attention", "hidden_size_per_layer_input", "num_kv_shared_layers"),
    # The sizes of what is refused, and the width of an MLP that shares keys and values.
    *("vocab_size_per_layer_input", "use_double_wide_mlp"),
    *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
)
KINDS = ("full_attention", "sliding_attention")
PATTERN = 6
"""The last of so many layers has full attention, unless `layer_types` is given."""

OUTSIDE = ("rope_theta", "partial_rotary_factor")
"""Fields outside the tables of ropes that count where a table lacks them."""

OWN_SIZES = ("head_dim", "num_key_value_heads")
"""What a layer may have of its own in `per_layer_config`."""


@frozen
class Gemma4:
    """What differs between the text of Gemma-4's architectures: `model_type` and defaults."""

    architecture: str
    model_type: str
    defaults: Json

    def read(self, hf: Json) -> ModelConfig:
        """Gemma-4's text: K = V where config says, experts beside the MLP, scalars of layers.

        raises: ValueError with the field, what was expected and its value
        """
        hf = complete_fields(without_nulls(hf, "rope_parameters"), self.defaults)
        _check_small(hf)
        if hf.get("use_bidirectional_attention") not in (None, "vision"):
            raise ValueError(
                "use_bidirectional_attention: expected null or 'vision', got "
                f"{quoted(hf['use_bidirectional_attention'])}"
            )
        # Each name has a rope table of its own.
        types = read_layer_types(hf, renamed={}) or [
            KINDS[bool((index + 1) % PATTERN)] for index in range(read_layer_count(hf))
        ]
        # transformers replaces any other type of the last layer.
        types[-1] = "full_attention"
        sizes = list(_read_sizes(hf, types))
        sources = _split_ropes(hf, types)
        head_dims: dict[str, set[int]] = {kind: set() for kind in sources}
        for kind, own in zip(types, sizes, strict=True):
            head_dims[kind].add(read_positive(hf, "head_dim") if own is None else own.head_dim)
        ropes = [_read_rope(source, head_dims[kind]) for kind, source in sources.items()]
        experts = _read_experts(hf)
        bias = read_bias(hf, "attention_bias")
        config = decoder_config(
            {name: value for name, value in hf.items() if name not in ROPE_FIELDS},
            self.architecture,
            model_types=(self.model_type,),
            fields=FIELDS,
            windows=windows_by_type(types, read_positive(hf, "sliding_window")),
            experts=[experts] * len(types),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QkNorm.HEAD,
            activation=read_activation(hf, "hidden_activation"),
            scale=1.0,
            ropes=ropes,
            layer_ropes=[list(sources).index(kind) for kind in types],
            sizes=sizes,
        )
        shares = read_flag(hf, "attention_k_eq_v", False)
        return evolve(
            config,
            layers=tuple(
                evolve(
                    layer,
                    has_own_values=not (shares and kind == "full_attention"),
                    scalar=f"{layer.prefix}scalar",
                )
                for layer, kind in zip(config.layers, types, strict=True)
            ),
            value_norm=True,
            wide_norms=True,
            post_norm=True,
            embedding_scale=config.hidden**0.5,
            head=Head(softcap=read_cap(hf, "final_logit_softcapping")),
            ignored_fields=(
                *config.ignored_fields,
                *(name for source in sources.values() for name in ignored_rope_fields(source)),
            ),
        )


def _check_small(hf: Json) -> None:
    """Raise ValueError for what E2B and E4B have beyond the others."""
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        value = hf.get(name, 0)
        if value is not None and read_whole(hf, name, 0) != 0:
            raise ValueError(
                f"{name}: expected 0, got {value}; Gemma-4 with embeddings by layer or shared keys "
                "and values (E2B, E4B) is not served, choose 12B, 26B-A4B or 31B"
            )


def _read_sizes(hf: Json, types: Sequence[str]) -> Iterator[LayerSizes | None]:
    """Each layer's own sizes.   raises: ValueError"""
    heads, inner = read_positive(hf, "num_attention_heads"), read_positive(hf, "intermediate_size")
    plain = {name: read_positive(hf, name) for name in OWN_SIZES}
    own = hf.get("per_layer_config")
    if own is None:
        full = {"head_dim": read_positive(hf, "global_head_dim", 512)}
        wide = hf.get("num_global_key_value_heads")
        if wide is not None and read_flag(hf, "attention_k_eq_v", False):
            full["num_key_value_heads"] = read_positive(hf, "num_global_key_value_heads")
        own = {str(i): full for i, kind in enumerate(types) if kind == "full_attention"}
    is_table = isinstance(own, Mapping) and all(str(index).isdecimal() for index in own)
    # transformers pads the numbers with zeros.
    by_index = {int(index): changes for index, changes in own.items()} if is_table else {}
    if not is_table or max(by_index, default=0) >= len(types):
        raise ValueError(
            f"per_layer_config: expected a table of layers below {len(types)}, got {quoted(own)}"
        )
    for index in range(len(types)):
        changes = by_index.get(index, {})
        if not isinstance(changes, Mapping) or not changes.keys() <= set(OWN_SIZES):
            raise ValueError(
                f"per_layer_config.{index}: expected {' and '.join(OWN_SIZES)}, got "
                f"{quoted(changes)}"
            )
        sizes = plain | {name: read_positive(changes, name) for name in changes}
        if heads % sizes["num_key_value_heads"]:
            raise ValueError(
                f"num_key_value_heads of layer {index}: expected a divisor of num_attention_heads "
                f"({heads}), got {sizes['num_key_value_heads']}"
            )
        yield (
            None
            if sizes == plain
            else LayerSizes(
                heads=heads,
                kv_heads=sizes["num_key_value_heads"],
                head_dim=sizes["head_dim"],
                intermediate=inner,
            )
        )


def _split_ropes(hf: Json, types: Sequence[str]) -> Mapping[str, Json]:
    """The input of `read_rope` for each kind of layer that there is.   raises: ValueError"""
    if "rope_scaling" in hf:
        raise ValueError(
            "rope_scaling: expected none beside rope_parameters, which has a table for each kind "
            f"of layer, got {quoted(hf['rope_scaling'])}"
        )
    tables = hf["rope_parameters"]
    kinds = [kind for kind in KINDS if kind in types]
    if not isinstance(tables, Mapping) or not all(
        isinstance(tables.get(kind), Mapping) for kind in kinds
    ):
        raise ValueError(
            f"rope_parameters: expected a table for each of {', '.join(kinds)}, got "
            f"{quoted(tables)}"
        )
    outside = {name: hf[name] for name in OUTSIDE if hf.get(name) is not None}
    return {kind: {"rope_parameters": {**outside, **tables[kind]}} for kind in kinds}


def _read_rope(source: Json, head_dims: Collection[int]) -> Rope:
    """The rope of layers with these widths of heads.   raises: ValueError"""
    if len(head_dims) > 1:
        raise ValueError(
            "per_layer_config: expected one head_dim for all layers of a kind, got "
            f"{' and '.join(map(str, sorted(head_dims)))}"
        )
    return read_rope(source, *head_dims, scalings=(*ANY_HEAD, "proportional"))


def _read_experts(hf: Json) -> Experts | None:
    """The experts of every layer, if there are any.   raises: ValueError"""
    if not read_flag(hf, "enable_moe_block", False):
        return None
    count, used = read_positive(hf, "num_experts"), read_positive(hf, "top_k_experts")
    if used > count:
        raise ValueError(f"top_k_experts: expected at most num_experts ({count}), got {used}")
    return Experts(
        count=count,
        per_token=used,
        intermediate=read_positive(hf, "moe_intermediate_size"),
        renormalize=True,
        has_scales=True,
        beside_mlp=True,
    )


TEXT = Gemma4("Gemma4ForCausalLM", "gemma4_text", TEXT_DEFAULTS)
UNIFIED_TEXT = Gemma4("Gemma4UnifiedForCausalLM", "gemma4_unified_text", UNIFIED_DEFAULTS)
PLACEHOLDERS = {"image": 258880, "video": 258884, "audio": 258881}
TOWERS = tuple(
    (f"{base}{name}.", what)
    for base in ("", "model.")
    for name, what in (
        ("vision_tower", "vision tower"),
        ("vision_embedder", "vision tower"),
        ("embed_vision", "vision tower"),
        ("audio_tower", "audio tower"),
        ("embed_audio", "audio tower"),
    )
)
"""Beginnings of names of parts beside the decoder -> what these are."""

GEMMA4 = decoder(TEXT.read, NAMES)
GEMMA4_UNIFIED = decoder(UNIFIED_TEXT.read, NAMES)
GEMMA4_BESIDE_IMAGES = text_decoder(
    "Gemma4ForConditionalGeneration",
    {TEXT.model_type: TEXT.read},
    NAMES,
    placeholders=PLACEHOLDERS,
    tied=True,
    towers=TOWERS,
)
GEMMA4_UNIFIED_BESIDE_IMAGES = text_decoder(
    "Gemma4UnifiedForConditionalGeneration",
    {UNIFIED_TEXT.model_type: UNIFIED_TEXT.read},
    NAMES,
    placeholders=PLACEHOLDERS,
    tied=True,
    towers=TOWERS,
)
