"""Reading config.json: what Hugging Face decoders have in common. A family states only its differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstock.errors import shown
from headstock.nn.rope import OPTIONAL, REQUIRED, SCALINGS
from headstock.spi import Experts, Feature, KVGroup, LayerConfig, ModelConfig, Rope

Json = Mapping[str, Any]

DTYPES = ("float32", "float16", "bfloat16")

MOST_LAYERS = 1024
"""Beyond any real model, and few enough to describe one by one."""

MOST_POSITIONS = 1 << 24
"""Beyond any real model, and few enough for a table of rotations."""


def decoder_config(
    hf: Json,
    architecture: str,
    *,
    windows: Sequence[int | None] | None = None,
    experts: Sequence[Experts | None] | None = None,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """The decoder that `hf`, a parsed config.json, describes.

    windows, experts: one entry a layer; None for a layer without
    raises: ValueError with the field, what was found and what was wanted
    """
    check_served(hf)
    hidden, heads = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
    kv_heads = positive(hf, "num_key_value_heads", heads)
    head_dim = positive(hf, "head_dim", default_head_dim or hidden // heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads is {heads}, which {kv_heads} num_key_value_heads do not divide")
    rope = read_rope(hf, head_dim)
    max_position = longest(rope, positive(hf, "max_position_embeddings"))
    if max_position > MOST_POSITIONS:
        raise ValueError(f"max_position_embeddings is {max_position}, wanted at most {MOST_POSITIONS}")
    count = layer_count(hf)
    # A window that no position reaches past is none.
    windows = [w if w is not None and w < max_position else None for w in windows or [None] * count]
    groups = kv_groups(windows, kv_heads, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab=positive(hf, "vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=positive(hf, "intermediate_size"),
        norm_eps=number(hf, "rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=rope,
        layers=layers(windows, experts or [None] * count, groups, head_dim),
        kv_groups=groups,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied_embeddings=flag(hf, "tie_word_embeddings", False),
        dtype=read_dtype(hf),
        eos_ids=read_eos(hf),
        features=frozenset({Feature.SLIDING_WINDOW} if any(windows) else ()),
    )


def check_served(hf: Json) -> None:
    """Raise ValueError when `hf` asks for what no decoder here does."""
    if hf.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config is set, but quantized weights are not supported; use the full-precision model"
        )
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act is {shown(activation)!r}, but only 'silu' is supported")


def layer_count(hf: Json) -> int:
    """How many layers the decoder has."""
    count = positive(hf, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {count}, wanted at most {MOST_LAYERS}")
    return count


def layers(
    windows: Sequence[int | None], experts: Sequence[Experts | None], groups: tuple[KVGroup, ...], head_dim: int
) -> tuple[LayerConfig, ...]:
    """The layers, each in the KV group of its window."""
    group_of = {index: number for number, group in enumerate(groups) for index in group.layers}
    return tuple(
        LayerConfig(
            index=index,
            prefix=f"layers.{index}.",
            group=group_of[index],
            scale=head_dim**-0.5,
            window=windows[index],
            experts=experts[index],
        )
        for index in range(len(windows))
    )


def kv_groups(windows: Sequence[int | None], kv_heads: int, head_dim: int) -> tuple[KVGroup, ...]:
    """One group for each different window, full attention first."""
    return tuple(
        KVGroup(
            layers=tuple(index for index, w in enumerate(windows) if w == window),
            kind="full" if window is None else "window",
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
        )
        for window in sorted(set(windows), key=lambda w: w or 0)
    )


def layer_windows(hf: Json) -> list[int | None]:
    """Each layer's window, as `layer_types` or else `max_window_layers` says (Qwen)."""
    count = layer_count(hf)
    window = positive(hf, "sliding_window", 4096) if flag(hf, "use_sliding_window", False) else None
    kinds = hf.get("layer_types")
    if kinds is None:
        first = whole(hf, "max_window_layers", 28)
        return [window if index >= first else None for index in range(count)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(k, str) and k in known for k in kinds):
        raise ValueError(f"layer_types is {shown(kinds)!r}, wanted {count} entries out of {', '.join(known)}")
    return [known[kind] for kind in kinds]


def read_rope(hf: Json, head_dim: int) -> Rope:
    """Rotary positions from `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
    title = next((name for name in ("rope_parameters", "rope_scaling") if hf.get(name) is not None), "rope_parameters")
    numbers = {} if hf.get(title) is None else hf[title]
    if not isinstance(numbers, dict) or any(isinstance(value, dict) for value in numbers.values()):
        raise ValueError(f"{title} is {shown(numbers)!r}, wanted one flat table for all layers")
    try:
        scaling = read_scaling(numbers)
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from None
    both = {**hf, **numbers}
    theta, dim = number(both, "rope_theta", 10000.0), int(head_dim * number(both, "partial_rotary_factor", 1.0))
    if theta <= 1:
        raise ValueError(f"rope_theta is {theta}, wanted above 1")
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValueError(f"head_dim is {head_dim}, of which {dim} are turned, wanted an even part of them")
    return Rope(theta=theta, dim=dim, scaling=scaling, parameters=numbers)


def read_scaling(numbers: Json) -> str:
    """The name of the scaling, once the table has the numbers that it needs; others' keys are passed over."""
    scaling = numbers.get("rope_type") or numbers.get("type") or "default"
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise ValueError(f"rope_type is {shown(scaling)!r}, wanted one of {', '.join(SCALINGS)}")
    for name in (*REQUIRED[scaling], *(name for name in OPTIONAL if name not in REQUIRED[scaling])):
        number(numbers, name, None if name in REQUIRED[scaling] else 1.0)
    if scaling == "llama3" and not numbers["low_freq_factor"] < numbers["high_freq_factor"]:
        raise ValueError("low_freq_factor is not below high_freq_factor")
    if scaling == "yarn":
        flag(numbers, "truncate", True)
    return scaling


def longest(rope: Rope, stated: int) -> int:
    """The most positions the model serves: those stated, or what YaRN stretches the original ones to."""
    original = rope.parameters.get("original_max_position_embeddings")
    if rope.scaling != "yarn" or original is None:
        return stated
    return max(stated, int(original * rope.parameters["factor"]))


def read_dtype(hf: Json) -> str:
    """The checkpoint's torch dtype, by name."""
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {shown(dtype)!r}, wanted one of {', '.join(DTYPES)}")
    return str(dtype)


def read_eos(hf: Json) -> tuple[int, ...]:
    """The tokens that end a text, without repetition."""
    found = hf.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id is {shown(found)!r}, wanted a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def positive(hf: Json, name: str, default: int | None = None) -> int:
    """The field, a whole number above 0; `default` where it is absent or null."""
    value = whole(hf, name, default)
    if value < 1:
        raise ValueError(f"{name} is {value}, wanted a number above 0")
    return value


def whole(hf: Json, name: str, default: int | None = None) -> int:
    """The field, a whole number; `default` where it is absent or null."""
    value = hf.get(name)
    value = default if value is None else value
    if type(value) is not int:
        raise ValueError(
            f"{name} is {shown(value)!r}, wanted a whole number" if value is not None else f"{name} is missing"
        )
    return value


def number(hf: Json, name: str, default: float | None = None) -> float:
    """The field, a number above 0; `default` where it is absent or null."""
    value = hf.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{name} is missing")
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} is {shown(value)!r}, wanted a number above 0")
    return float(value)


def flag(hf: Json, name: str, default: bool) -> bool:
    """The field, true or false; `default` where it is absent or null."""
    value = hf.get(name)
    value = default if value is None else value
    if type(value) is not bool:
        raise ValueError(f"{name} is {shown(value)!r}, wanted true or false")
    return value
