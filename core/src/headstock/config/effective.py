"""The configuration in effect: all sources merged, with where each value came from."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from headstock.config.catalog import (
    engine_settings,
    find_setting_name,
    keyword_names,
    make_spelling,
    sampling_settings,
)
from headstock.config.engine import EngineConfig
from headstock.config.setting_rules import POOL_SIZES, describe_size_conflict
from headstock.config.sources import (
    SourceValue,
    SourceValues,
    from_environment,
    from_file,
    from_preset,
)
from headstock.config.spelling import Surface
from headstock.config.value_types import Value
from headstock.errors import UsageError, shorten

EXPLICIT = ("flag", "keyword", "environment", "file")
"""Ranks of values that the user wrote down, highest first (a program has keywords where the command
line has flags).
"""


@frozen
class ResolvedConfig:
    """What is in effect.

    `sampling` holds only what was given; `origins` maps every setting's key to "default", or "flag
    --page-size", "environment HEADSTOCK_TP", "file engine.toml", "preset debug"; `notes` are lines
    that the user should see; `file` is where settings were read from, if anywhere.
    """

    engine: EngineConfig
    sampling: Mapping[str, Value]
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    file: str | None = None

    @property
    def parameter_names(self) -> Mapping[str, str]:
        """What sampling parameters are called here: the flag or the variable that was used, the
        flag where none was.
        """
        flags = {key: setting.flag for key, setting in sampling_settings().items()}
        used = {key: self.origins[key].partition(" ") for key in flags}
        named = {
            key: name for key, (rank, _, name) in used.items() if rank in ("flag", "environment")
        }
        return {
            **flags,
            **named,
            **{key: key for key, (rank, *_) in used.items() if rank == "file"},
        }


def merge_sources(
    flags: SourceValues, environ: Mapping[str, str], *, keywords: bool = False
) -> ResolvedConfig:
    """The configuration in effect under flags (or keywords), environment, file, preset and
    defaults, in this order.

    `keywords`: `flags` are keywords of Python.
    raises: UsageError; ModelError when the file cannot be read
    """
    environment, notes = from_environment(environ)
    above = ChainMap(dict(flags), dict(environment))
    path = str(above["config"].value()) if "config" in above else None
    file = from_file(path) if path is not None else {}
    asked = above.get("preset", file.get("preset"))
    preset = from_preset(asked) if asked is not None else {}
    given = dict(ChainMap(dict(flags), dict(environment), dict(file), dict(preset)))
    plain = make_spelling(
        Surface(keywords=keywords)
    )  # a note on an alias says what it was taken as
    with plain.render_errors():
        given, replaced = drop_replaced_sizes(given)
    aliases = tuple(note for one in given.values() for note in one.notes())
    values: dict[str, Any] = {key: one.value() for key, one in given.items()}
    origins = {key: one.origin for key, one in given.items()}
    cuts = limit_running_requests(values, given, origins)
    surface = Surface(keywords=keywords, names=dict(collect_used_names(flags)))
    fields = {
        setting.name: values[key] for key, setting in engine_settings().items() if key in values
    }
    return ResolvedConfig(
        engine=EngineConfig(surface=surface, **fields),
        sampling={k: values[k] for k in sampling_settings() if values.get(k) is not None},
        origins={k: origins.get(k, "default") for k in (*engine_settings(), *sampling_settings())},
        notes=tuple(map(plain.render, (*notes, *aliases, *replaced, *cuts))),
        file=path,
    )


def collect_used_names(flags: SourceValues) -> Iterator[tuple[str, str]]:
    """The keys of settings given as flags or keywords, with the names that were used."""
    for key, one in flags.items():
        if not one.name.inverted and one.source_name != one.name.setting.negative:
            yield key, one.source_name


def drop_replaced_sizes(given: SourceValues) -> tuple[dict[str, SourceValue], tuple[str, ...]]:
    """What remains when a size of a higher rank has replaced those below it, and a line for each
    that it replaced.

    raises: UsageError when two pool sizes have the same rank
    """
    sizes = {
        key: given[key] for key in POOL_SIZES if key in given and given[key].value() is not None
    }
    ranks = [*EXPLICIT, "preset"]
    best = min((ranks.index(one.source_kind) for one in sizes.values()), default=0)
    winners = {key: one for key, one in sizes.items() if ranks.index(one.source_kind) == best}
    if len(winners) > 1:
        raise UsageError(describe_size_conflict([one.source_text for one in winners.values()]))
    losers = {key: one for key, one in sizes.items() if key not in winners}
    notes = tuple(
        f"{one.source_text}: replaced by {w.source_text}"
        for w in winners.values()
        for one in losers.values()
    )
    dropped = set(losers)
    for size in ("page_size", "max_seq_len"):
        if size in given and given[size].source_kind != "preset":
            dropped |= {f"{size}_or_less"} & {
                key for key, one in given.items() if one.source_kind == "preset"
            }
    return {key: one for key, one in given.items() if key not in dropped}, notes


def limit_running_requests(
    values: dict[str, Any], given: SourceValues, origins: dict[str, str]
) -> tuple[str, ...]:
    """A line when the running requests had to be cut to the token budget; two written values are
    left to EngineConfig.

    writes: values, origins
    """
    tokens = values.get("max_batch_tokens", EngineConfig().max_batch_tokens)
    running = values.get("max_running_requests", EngineConfig().max_running_requests)
    both = [
        given[key].source_kind in EXPLICIT
        for key in ("max_batch_tokens", "max_running_requests")
        if key in given
    ]
    if running <= tokens or both == [True, True]:
        return ()
    values["max_running_requests"] = tokens
    origins["max_running_requests"] = (
        f"{origins.get('max_running_requests', 'default')} (cut to max_batch_tokens)"
    )
    return (
        f"max_running_requests {running} is cut to max_batch_tokens {tokens}: "
        "a step gives each running request one token or more",
    )


def resolve_keywords(
    given: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """The configuration in effect for Python keywords; keywords rank as flags do.

    raises: UsageError, for an unknown keyword with a suggestion
    """
    source: dict[str, SourceValue] = {}
    plain = make_spelling(Surface())
    for word, raw in given.items():
        if word in sampling_settings() and word not in keyword_names():
            raise UsageError(
                f"{word}: a sampling value, not an engine's; give it to SamplingParams"
            )
        with plain.render_errors():
            name = find_setting_name(word, keyword_names(), f"{word}={shorten(raw)}")
        one = SourceValue(name, raw, "keyword", word, f"{word}={shorten(raw)}")
        if (earlier := source.get(name.setting.key)) is not None:
            raise UsageError(
                f"{earlier.source_text} and {one.source_text} set the same value; keep one of them"
            )
        source[name.setting.key] = one
    return merge_sources(source, os.environ if environ is None else environ, keywords=True)
