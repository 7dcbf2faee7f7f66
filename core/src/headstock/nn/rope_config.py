"""Rotary positions as config.json describes them, with the precedence that transformers has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from headstock.nn.config_fields import Json, quoted, read_flag, read_number
from headstock.nn.rope import SCALINGS
from headstock.spi import Rope

LAYER_TYPES = ("full_attention", "sliding_attention")

ORIGINAL = "original_max_position_embeddings"

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
    "proportional": (),
    "yarn": ("factor",),
}
"""Type of scaling -> the numbers that it cannot do without."""

_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "llama3": (ORIGINAL,),
    "longrope": (ORIGINAL, "factor", "attention_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
    "yarn": (ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
"""Type of scaling -> the numbers that have a default."""

_LISTS: Mapping[str, tuple[str, ...]] = {"longrope": ("short_factor", "long_factor")}
"""Type of scaling -> lists of numbers, one a pair, that it cannot do without."""

FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL)
"""The fields of config.json that are read here."""


ANY_HEAD = tuple(name for name in SCALINGS if name not in ("longrope", "proportional"))
"""The types of scaling that any family may have."""


def read_rope(
    hf: Json,
    head_dim: int,
    *,
    default_theta: float = 10000.0,
    partial: bool = False,
    interleaved: bool = False,
    scalings: Collection[str] = ANY_HEAD,
    width_field: str = "head_dim",
) -> Rope:
    """Rotary positions of whole heads, or of their first part where the family is `partial`.

    A `rope_scaling` that is not empty replaces `rope_parameters`. What the table lacks comes from
    the top level, but an `original_max_position_embeddings` of the top level replaces that of the
    table.
    width_field: the field that `head_dim` comes from, as errors name it
    raises: ValueError with the field, what was expected and its value
    """
    title, table = _read_table(hf)
    try:
        scaling = _read_scaling(table, scalings)
        numbers = _read_numbers(hf, table, scaling)
        theta = {"rope_theta": hf.get("rope_theta", default_theta), **table}
        base = read_number(theta, "rope_theta")
    except ValueError as error:
        raise ValueError(f"{title}: {error}" if title in hf else str(error)) from None
    if base <= 1:
        raise ValueError(f"rope_theta: expected a number above 1, got {base}")
    part = table.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if scaling == "proportional" and part is not None:
        # Its tables are as wide as a head, whatever part of it turns.
        _read_part(head_dim, part, is_exact=False)
        part = 1
    # transformers drops the factor under plain positions and fails under scaled ones; others turn a
    # part of the head.
    is_null = part is None and (
        "partial_rotary_factor" in table or (partial and "partial_rotary_factor" in hf)
    )
    if is_null or not (partial or part in (None, 1)):
        raise ValueError(
            f"partial_rotary_factor: expected 1.0, since this family rotates whole heads, got "
            f"{quoted(part)}"
        )
    if head_dim % 2:
        raise ValueError(
            f"{width_field}: expected an even number, since rope rotates pairs, got {head_dim}"
        )
    dim = _read_part(head_dim, part) if partial and part is not None else head_dim
    lists = {name: _read_list(table, name, dim // 2) for name in _LISTS.get(scaling, ())}
    return Rope(
        theta=base,
        dim=dim,
        scaling=scaling,
        parameters={**numbers, **lists},
        interleaved=interleaved,
    )


def split_ropes(hf: Json, thetas: Mapping[str, tuple[str | None, float]]) -> Mapping[str, Json]:
    """The input of `read_rope` for each kind of layer, where kinds have ropes of their own.

    `rope_parameters` has a table for each. Older files have `rope_scaling`, which is for full
    layers alone, and bases outside.
    thetas: kind -> the field with its base, or None for none, and the default
    raises: ValueError
    """
    tables = {} if hf.get("rope_parameters") is None else hf["rope_parameters"]
    if not isinstance(tables, dict) or not tables.keys() <= thetas.keys():
        raise ValueError(
            f"rope_parameters: expected a table for each of {', '.join(thetas)}, got "
            f"{quoted(tables)}"
        )
    sources: dict[str, Json] = {}
    for kind, (field, default) in thetas.items():
        table = {} if tables.get(kind) is None else tables[kind]
        if not isinstance(table, dict):
            raise ValueError(f"rope_parameters.{kind}: expected a table, got {quoted(table)}")
        if kind == "full_attention" and hf.get("rope_scaling") is not None:
            scaling = hf["rope_scaling"]
            if not isinstance(scaling, dict):
                raise ValueError(f"rope_scaling: expected a table, got {quoted(scaling)}")
            if hf.get("rope_parameters") is not None and tables.get(kind) is None:
                # transformers fails without the table to scale.
                raise ValueError(
                    "rope_scaling has no rope_parameters.full_attention to scale; give that "
                    "table, or leave rope_parameters out"
                )
            table = {**table, **scaling}
        if "type" in table and "rope_type" not in table:
            # transformers ignores the older name here, and therefore the scaling.
            raise ValueError(f"the rope table of {kind}: expected 'rope_type', got only 'type'")
        # Fields outside the tables apply to all kinds.
        part = hf.get("partial_rotary_factor")
        outside = {} if part is None else {"partial_rotary_factor": part}
        theta = default if field is None else hf.get(field, default)
        sources[kind] = {"rope_parameters": {"rope_theta": theta, **outside, **table}}
    return sources


def drop_sections(hf: Json) -> Json:
    """`hf` with the rope that text has where each section of a head has positions of its own.

    The sections turn by the time, row and column of an image's part. A token of text has the same
    number for all of them, which makes plain rope.
    """
    sections = ("mrope_section", "mrope_interleaved")
    tables = {title: hf[title] for title in ("rope_scaling", "rope_parameters") if title in hf}
    return {
        **hf,
        **{
            title: {
                name: "default" if name in ("type", "rope_type") and value == "mrope" else value
                for name, value in table.items()
                if name not in sections
            }
            for title, table in tables.items()
            if isinstance(table, Mapping)
        },
    }


def _read_part(head_dim: int, part: object, *, is_exact: bool = True) -> int:
    """How many elements of a head are turned.   raises: ValueError"""
    if type(part) not in (int, float) or not 0 < part <= 1:  # type: ignore[operator]
        raise ValueError(
            f"partial_rotary_factor: expected above 0 and at most 1, got {quoted(part)}"
        )
    dim = int(head_dim * part)  # type: ignore[operator]
    if is_exact and (dim % 2 or not dim):
        raise ValueError(
            f"partial_rotary_factor: expected an even number of the {head_dim} elements of a head, "
            f"got {part}, which rotates {dim}"
        )
    return dim


def _read_list(table: Json, name: str, count: int) -> tuple[float, ...]:
    """`count` numbers above 0, one for each rotated pair of elements.   raises: ValueError"""
    values = table.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name}: expected a list of {count} numbers, got {quoted(values)}")
    return tuple(read_number({name: value}, name) for value in values)


def stretched_length(rope: Rope, stated: int) -> int:
    """The most positions that the model serves: as stated, or as many as YaRN stretches to."""
    original = rope.parameters.get(ORIGINAL)
    if rope.scaling != "yarn" or original is None:
        return stated
    return max(stated, int(original * rope.parameters["factor"]))


def ignored_rope_fields(hf: Json) -> Iterator[str]:
    """The names of what `read_rope` leaves unread in the fields that are its own."""
    title, table = _read_table(hf)
    scaling = _read_scaling(table, SCALINGS)
    if title == "rope_scaling" and hf.get("rope_parameters"):
        yield "rope_parameters"
    if "rope_theta" in table and hf.get("rope_theta") not in (None, table["rope_theta"]):
        yield "rope_theta"
    if hf.get(ORIGINAL) is not None and ORIGINAL not in _OPTIONAL.get(scaling, ()):
        yield ORIGINAL
    read = (
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        *_REQUIRED[scaling],
        *_OPTIONAL.get(scaling, ()),
        *_LISTS.get(scaling, ()),
    )
    yield from (
        f"{title}.{name}"
        for name in table
        if name not in read and (name, scaling) != ("truncate", "yarn")
    )


def _read_table(hf: Json) -> tuple[str, Json]:
    """The table that counts, with its name; an empty one where there is none."""
    title = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    table = {} if hf.get(title) is None else hf[title]
    is_flat = isinstance(table, dict) and not any(
        isinstance(value, dict) or name in LAYER_TYPES for name, value in table.items()
    )
    if not is_flat:
        raise ValueError(f"{title}: expected one flat table for all layers, got {quoted(table)}")
    return title, table


def _read_scaling(table: Json, scalings: Collection[str]) -> str:
    """The type of scaling."""
    scaling = table.get("rope_type", table.get("type", "default"))
    if not isinstance(scaling, str) or scaling not in scalings:
        raise ValueError(f"rope_type: expected one of {', '.join(scalings)}, got {quoted(scaling)}")
    return scaling


def _read_numbers(hf: Json, table: Json, scaling: str) -> Json:
    """The numbers that the scaling reads, as far as they are stated; others are passed over."""
    if ORIGINAL in _OPTIONAL.get(scaling, ()) and ORIGINAL in hf:
        table = {**table, ORIGINAL: hf[ORIGINAL]}
    numbers = {name: read_number(table, name) for name in _REQUIRED[scaling]}
    for name in _OPTIONAL.get(scaling, ()):
        if name in table and (table[name] is not None or name == ORIGINAL):
            numbers[name] = read_number(table, name)
    if scaling == "llama3" and not numbers["low_freq_factor"] < numbers["high_freq_factor"]:
        raise ValueError(
            f"low_freq_factor: expected below high_freq_factor ({numbers['high_freq_factor']}), "
            f"got {numbers['low_freq_factor']}"
        )
    return (
        {**numbers, "truncate": read_flag(table, "truncate", True)}
        if scaling == "yarn"
        else numbers
    )
