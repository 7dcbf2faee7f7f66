"""config.json of Hugging Face decoders: what they share. A family states only its differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headstock.errors import shorten
from headstock.nn.config_fields import Json, quoted, read_flag, read_number, read_positive
from headstock.nn.config_keys import check_served, ignored_fields
from headstock.nn.rope_config import FIELDS as ROPE_FIELDS
from headstock.nn.rope_config import LAYER_TYPES, ignored_rope_fields, read_rope, stretched_length
from headstock.spi import (
    Activation,
    DeltaRule,
    Experts,
    Feature,
    FullKV,
    KVGroup,
    LayerConfig,
    LayerSizes,
    ModelConfig,
    QkNorm,
    Rope,
    ShortConv,
)

DTYPES = ("float32", "float16", "bfloat16")

_MOST_LAYERS = 1024
"""Beyond any real model, and few enough to describe one by one."""

_MOST_PARTS = 4096
"""More heads or experts than any real model has, and few enough to name one by one."""

_MOST_POSITIONS = 1 << 24
"""Beyond any real model, and few enough for a table of rotations."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
"""What config.json calls an activation -> which it is. `gelu` alone is exact."""

_RENAMED_TYPES: Mapping[str, str] = {"attention": "full_attention"}
"""Layer types as earlier releases of transformers wrote them."""

FIELDS = frozenset(
    (
        *(
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ),
        *(
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "layer_types",
        ),
        *(
            "hidden_act",
            "tie_word_embeddings",
            "dtype",
            "torch_dtype",
            "eos_token_id",
            *ROPE_FIELDS,
        ),
    )
)
"""The fields of config.json that every family reads."""


def decoder_config(
    hf: Json,
    architecture: str,
    *,
    windows: Sequence[int | None] | None = None,
    experts: Sequence[Experts | None] | None = None,
    convs: Sequence[ShortConv | DeltaRule | None] | None = None,
    gates: bool = False,
    model_types: Collection[str] = (),
    fields: Collection[str] = (),
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm = QkNorm.NONE,
    activation: Activation | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    ropes: Sequence[Rope] = (),
    layer_ropes: Sequence[int | None] | None = None,
    sizes: Sequence[LayerSizes | None] | None = None,
) -> ModelConfig:
    """The decoder that `hf`, a parsed config.json, describes.

    convs: what layers have instead of attention
    gates: whether attention has a gate
    windows, experts, convs: one entry a layer, None for a layer without; absent where no layer has
        any
    model_types: the `model_type` that the architecture goes with, empty for any
    fields: what the family reads beside `FIELDS`
    default_head_dim, default_kv_heads: where config.json has none; None for `hidden // heads` and
        `heads`
    activation: None for what `hidden_act` says
    scale: of attention scores; None for one over the root of head_dim
    softcap: the bound of attention scores; 0 for none
    sinks: whether each layer has attention sinks
    ropes: as the family reads them; empty for one, by `read_rope`
    layer_ropes: which rope a layer has, or None for none; absent where all layers have the first
    sizes: a layer's own, or None; absent where no layer has any
    raises: ValueError with the field, what was expected and its value
    """
    _check_model_type(hf, architecture, model_types)
    check_served(hf, fields)
    hidden, heads = read_positive(hf, "hidden_size"), read_positive(hf, "num_attention_heads")
    _check_parts("num_attention_heads", heads)
    _check_parts("experts in a layer", max((e.count for e in experts or () if e), default=0))
    kv_heads = read_positive(hf, "num_key_value_heads", default_kv_heads or heads)
    head_dim = read_positive(hf, "head_dim", default_head_dim or hidden // heads)
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor of num_attention_heads ({heads}), got "
            f"{kv_heads}"
        )
    ropes = tuple(ropes) or (read_rope(hf, head_dim),)
    stated = read_positive(hf, "max_position_embeddings")
    max_position = max(stretched_length(rope, stated) for rope in ropes)
    if max_position > _MOST_POSITIONS:
        raise ValueError(
            f"max_position_embeddings: expected at most {_MOST_POSITIONS}, got {max_position}"
        )
    count = read_layer_count(hf)
    # A window that no position reaches past is none.
    windows = [
        w if w is not None and w < max_position else None
        for w in windows or uniform_windows(hf, None)
    ]
    convs = convs or [None] * count
    # A group a window: a window group frees the pages behind its window (decision 0025).
    sizes = sizes or [None] * count
    layouts = [
        FullKV(kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim)
        if own is None
        else FullKV(kv_heads=own.kv_heads, k_dim=own.head_dim, v_dim=own.head_dim)
        for own in sizes
    ]
    groups = _make_kv_groups(windows, convs, layouts)
    layers = make_layers(
        windows,
        experts or [None] * count,
        convs,
        groups,
        [layout.k_dim**-0.5 if scale is None else scale for layout in layouts],
        softcap,
        layer_ropes or [0] * count,
        sizes,
        sinks,
        gates,
    )
    needed = {
        Feature.SLIDING_WINDOW: any(windows),
        Feature.SOFTCAP: softcap != 0,
        Feature.SINKS: sinks,
    }
    return ModelConfig(
        architecture=architecture,
        vocab=read_positive(hf, "vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read_positive(hf, "intermediate_size"),
        norm_eps=read_number(hf, "rms_norm_eps", 1e-6),
        max_position=max_position,
        ropes=ropes,
        layers=layers,
        kv_groups=groups,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        activation=read_activation(hf) if activation is None else activation,
        tied_embeddings=read_flag(hf, "tie_word_embeddings", False),
        dtype=_read_dtype(hf),
        eos_ids=_read_eos(hf),
        features=frozenset(feature for feature, is_needed in needed.items() if is_needed),
        ignored_fields=(
            *ignored_fields(hf, (*FIELDS, *fields), has_windows=any(windows)),
            *ignored_rope_fields(hf),
        ),
    )


def _check_model_type(hf: Json, architecture: str, model_types: Collection[str]) -> None:
    """Raise ValueError when `model_type`, by which transformers chooses, is another family's."""
    model_type = hf.get("model_type")
    if model_types and model_type is not None and model_type not in model_types:
        raise ValueError(
            f"model_type: expected {' or '.join(model_types)} for {architecture}, got "
            f"{quoted(model_type)}"
        )


def _check_parts(what: str, count: int) -> None:
    """Raise ValueError for more than can be named one by one."""
    if count > _MOST_PARTS:
        raise ValueError(f"{what}: expected at most {_MOST_PARTS}, got {count}")


def read_layer_count(hf: Json) -> int:
    """How many layers the decoder has."""
    count = read_positive(hf, "num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers: expected at most {_MOST_LAYERS}, got {count}")
    return count


def make_layers(
    windows: Sequence[int | None],
    experts: Sequence[Experts | None],
    convs: Sequence[ShortConv | DeltaRule | None],
    groups: tuple[KVGroup, ...],
    scales: Sequence[float],
    softcap: float,
    ropes: Sequence[int | None],
    sizes: Sequence[LayerSizes | None],
    sinks: bool = False,
    gates: bool = False,
) -> tuple[LayerConfig, ...]:
    """The layers, each in the KV group of its window."""
    group_of = {index: number for number, group in enumerate(groups) for index in group.layers}
    return tuple(
        LayerConfig(
            index=index,
            prefix=f"layers.{index}.",
            group=group_of[index],
            scale=scales[index],
            window=windows[index],
            softcap=softcap,
            rope=ropes[index],
            experts=experts[index],
            conv=conv if isinstance(conv := convs[index], ShortConv) else None,
            delta=conv if isinstance(conv, DeltaRule) else None,
            has_gate=gates and conv is None,
            sizes=sizes[index],
            sinks=f"layers.{index}.sinks" if sinks and convs[index] is None else None,
        )
        for index in range(len(windows))
    )


def _make_kv_groups(
    windows: Sequence[int | None],
    convs: Sequence[ShortConv | DeltaRule | None],
    layouts: Sequence[FullKV],
) -> tuple[KVGroup, ...]:
    """One group for each different window and layout, and one for each convolution.

    Full attention comes first, then windows by their width.
    """
    attention = [index for index, conv in enumerate(convs) if conv is None]
    kinds = dict.fromkeys((windows[index], layouts[index]) for index in attention)
    tokens = (
        KVGroup(
            layers=tuple(i for i in attention if (windows[i], layouts[i]) == (window, layout)),
            layout=layout,
            window=window,
        )
        for window, layout in sorted(kinds, key=lambda kind: kind[0] or 0)
    )
    states = (
        KVGroup(
            layers=tuple(index for index, other in enumerate(convs) if other == conv),
            layout=conv.layout,
        )
        for conv in dict.fromkeys(convs)
        if conv is not None
    )
    return (*tokens, *states)


def complete_fields(hf: Json, defaults: Json) -> Json:
    """`hf` with the family's defaults of what is absent; null KV heads are as many as heads."""
    hf = {**defaults, **hf}
    if "num_key_value_heads" in hf and hf["num_key_value_heads"] is None:
        hf["num_key_value_heads"] = hf.get("num_attention_heads")
    return hf


def read_head_dim(hf: Json) -> int:
    """The width of a head; where the field is absent, that of `hidden_size` over all heads."""
    hidden, heads = read_positive(hf, "hidden_size"), read_positive(hf, "num_attention_heads")
    return read_positive(hf, "head_dim", hidden // heads)


def check_whole_heads(hf: Json) -> None:
    """Raise ValueError where transformers does: heads that do not divide `hidden_size`."""
    hidden, heads = read_positive(hf, "hidden_size"), read_positive(hf, "num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"hidden_size: expected a multiple of num_attention_heads ({heads}), got {hidden}"
        )


def read_activation(hf: Json, name: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation of the feed-forward part's gate, as that field names it.

    raises: ValueError
    """
    value = hf.get(name, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ValueError(f"{name}: expected one of {', '.join(_ACTIVATIONS)}, got {quoted(value)}")
    return _ACTIVATIONS[value]


def read_cap(hf: Json, name: str) -> float:
    """The bound of scores that the field states; 0, for none, where it is absent or null."""
    return 0.0 if hf.get(name) is None else read_number(hf, name)


def read_layer_types(
    hf: Json, served: Sequence[str] = LAYER_TYPES, *, renamed: Mapping[str, str] = _RENAMED_TYPES
) -> list[str] | None:
    """Each layer's type as `layer_types` has it; None where the field is absent or null.

    renamed: names of earlier releases and those of today
    """
    types = hf.get("layer_types")
    if types is None:
        return None
    count, allowed = read_layer_count(hf), (*served, *renamed)
    if (
        not isinstance(types, list)
        or len(types) != count
        or not all(type(t) is str and t in allowed for t in types)
    ):
        raise ValueError(
            f"layer_types: expected {count} entries out of {', '.join(served)}, got {quoted(types)}"
        )
    return [renamed.get(name, name) for name in types]


def windows_by_type(types: Sequence[str], window: int | None) -> list[int | None]:
    """Each layer's window by its type.

    raises: ValueError for a sliding layer where there is no window
    """
    if window is None and "sliding_attention" in types:
        raise ValueError(
            "sliding_window: expected a width for the sliding_attention of layer_types, got none; "
            "some families also need use_sliding_window"
        )
    return [window if name == "sliding_attention" else None for name in types]


def uniform_windows(hf: Json, window: int | None) -> list[int | None]:
    """`window` for every layer; a `layer_types` field may only repeat that."""
    layer_type = "full_attention" if window is None else "sliding_attention"
    if any(name != layer_type for name in read_layer_types(hf) or ()):
        raise ValueError(
            f"layer_types: expected {layer_type!r} for every layer, got {quoted(hf['layer_types'])}"
        )
    return [window] * read_layer_count(hf)


def _read_dtype(hf: Json) -> str:
    """The checkpoint's torch dtype, by name."""
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {shorten(dtype)!r}")
    return str(dtype)


def _read_eos(hf: Json) -> tuple[int, ...]:
    """The tokens that end a text, without repetition."""
    value = hf.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(
            f"eos_token_id: expected a token id or a list of them, got {shorten(value)!r}"
        )
    return tuple(dict.fromkeys(ids))
