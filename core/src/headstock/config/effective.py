"""The configuration in effect: all sources merged, with where each value came from."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, get_args

from attrs import evolve, frozen

from headstock.config.catalog import (
    SettingName,
    engine_settings,
    find_setting_name,
    keyword_names,
    sampling_settings,
)
from headstock.config.engine import EngineConfig
from headstock.config.equivalents import Meaning, find_meaning
from headstock.config.setting import flag_to_key
from headstock.config.setting_rules import POOL_SIZES, describe_size_conflict
from headstock.config.sources import (
    SourceKind,
    SourceValue,
    SourceValues,
    check_set_once,
    from_environment,
    from_file,
    from_preset,
)
from headstock.config.value_types import Value
from headstock.errors import UsageError, name_setting, shorten
from headstock.logs import log_event

LOG = logging.getLogger(__name__)

PRECEDENCE: tuple[SourceKind, ...] = get_args(SourceKind)
"""Kinds of sources, the first wins. A program has keywords where the command line has flags."""
EXPLICIT = frozenset(PRECEDENCE) - {"preset"}
"""Kinds of sources in which the user wrote the value down."""


@frozen
class ResolvedConfig:
    """The settings in effect.

    `sampling` holds only the values that a source set. `origins` maps every setting's key to
    "default", "flag --page-size", "environment HEADSTOCK_TP", "file engine.toml" or "preset debug".
    `notes` are lines for the user; `file` is the configuration file, if there is one.
    """

    engine: EngineConfig
    sampling: Mapping[str, Value]
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    file: str | None = None


def merge_sources(
    flags: SourceValues, environ: Mapping[str, str], *, is_command: bool
) -> ResolvedConfig:
    """The configuration under flags (or keywords), environment, file, preset, defaults, in order.

    raises: UsageError; ModelError when the file cannot be read
    """
    environment, notes = from_environment(environ)
    above = ChainMap(dict(flags), dict(environment))
    # A file cannot name another file, but it can name a preset.
    path = str(above["config"].value()) if "config" in above else None
    file = from_file(path) if path is not None else {}
    requested = above.get("preset", file.get("preset"))
    preset = from_preset(requested) if requested is not None else {}
    merged = dict(ChainMap(dict(flags), dict(environment), dict(file), dict(preset)))
    merged, replaced = _drop_replaced_sizes(merged)
    aliases = tuple(note for value in merged.values() for note in value.alias_notes())
    # Read only now: a bad value that a source of higher precedence overrides does no harm
    # (docs/decisions/0006-configuration.md).
    values: dict[str, Any] = {key: value.value() for key, value in merged.items()}
    origins = {key: value.origin for key, value in merged.items()}
    cuts = _limit_running_requests(values, merged, origins)
    fields = {
        setting.name: values[key] for key, setting in engine_settings().items() if key in values
    }
    return ResolvedConfig(
        engine=EngineConfig(is_command=is_command, **fields),
        sampling={k: values[k] for k in sampling_settings() if values.get(k) is not None},
        origins={k: origins.get(k, "default") for k in (*engine_settings(), *sampling_settings())},
        notes=(*notes, *aliases, *replaced, *cuts),
        file=path,
    )


def _drop_replaced_sizes(values: SourceValues) -> tuple[dict[str, SourceValue], tuple[str, ...]]:
    """`values` without the pool sizes that one of higher precedence replaces, and a note for each.

    A page size or length that the user wrote is exact: a preset's `..._or_less` is dropped too.
    raises: UsageError when two pool sizes have the same precedence
    """
    sizes = {
        key: values[key] for key in POOL_SIZES if key in values and values[key].value() is not None
    }
    # The pool sizes are one choice (docs/decisions/0006-configuration.md): a preset's ratio must
    # not stand in the way of a --num-pages.
    best = min(map(_precedence, sizes.values()), default=0)
    winners = {key: size for key, size in sizes.items() if _precedence(size) == best}
    if len(winners) > 1:
        raise UsageError(describe_size_conflict([size.text for size in winners.values()]))
    losers = {key: size for key, size in sizes.items() if key not in winners}
    notes = tuple(
        f"{loser.text}: replaced by {winner.text}"
        for winner in winners.values()
        for loser in losers.values()
    )
    # A preset's bound is for the preset's size; left in place it would bend the exact one that the
    # user wrote.
    dropped = set(losers)
    for size in ("page_size", "max_seq_len"):
        bound = f"{size}_or_less"
        if (
            size in values
            and values[size].source_kind != "preset"
            and bound in values
            and values[bound].source_kind == "preset"
        ):
            dropped.add(bound)
    return {key: value for key, value in values.items() if key not in dropped}, notes


def _precedence(value: SourceValue) -> int:
    """0 for the source that wins over all others."""
    return PRECEDENCE.index(value.source_kind)


def _limit_running_requests(
    values: dict[str, Any], sources: SourceValues, origins: dict[str, str]
) -> tuple[str, ...]:
    """A note when the running requests had to be cut to the token budget of a step.

    Two values that the user wrote are left to EngineConfig, which refuses them.
    writes: values, origins
    """
    tokens = values.get("max_batch_tokens", EngineConfig().max_batch_tokens)
    running = values.get("max_running_requests", EngineConfig().max_running_requests)
    has_both = all(
        key in sources and sources[key].source_kind in EXPLICIT
        for key in ("max_batch_tokens", "max_running_requests")
    )
    # One of the two may be a default or a preset's, which the user's other value should not break.
    if running <= tokens or has_both:
        return ()
    values["max_running_requests"] = tokens
    origins["max_running_requests"] = (
        f"{origins.get('max_running_requests', 'default')} (cut to max_batch_tokens)"
    )
    return (
        f"{name_setting('max_running_requests')} {running} is cut to "
        f"{name_setting('max_batch_tokens')} {tokens}: a step gives each running request one token "
        "or more",
    )


def resolve_keywords(
    keywords: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """The configuration in effect for Python keywords, which take the precedence of flags.

    raises: UsageError, for an unknown keyword with a suggestion
    """
    values: dict[str, SourceValue] = {}
    foreign: list[str] = []
    for word, raw in keywords.items():
        meaning = None if word in keyword_names() else find_meaning(word, raw)
        if meaning is not None:
            foreign += take_meaning(meaning, values, "keyword", word, f"{word}={shorten(raw)}")
            continue
        # In the file and the environment there is no SamplingParams, so there these names are
        # settings.
        if word in sampling_settings() and word not in keyword_names():
            raise UsageError(
                f"{word}: a sampling value, not an engine's; give it to SamplingParams"
            )
        source_text = f"{word}={shorten(raw)}"
        name = find_setting_name(word, keyword_names(), source_text)
        value = SourceValue(name, raw, "keyword", word)
        check_set_once(values, value)
        values[name.setting.key] = value
    environ = os.environ if environ is None else environ
    resolved = merge_sources(values, environ, is_command=False)
    return evolve(resolved, notes=(*foreign, *resolved.notes))


def take_meaning(
    meaning: Meaning,
    values: dict[str, SourceValue],
    source_kind: SourceKind,
    source_name: str,
    source_text: str,
) -> list[str]:
    """The notes on another engine's setting.

    writes: values, where it is another setting here
    raises: UsageError when that is set already
    """
    if not meaning.setting:
        return [f"{source_text}: this is already the default behaviour"]
    setting = engine_settings()[meaning.setting]
    name = SettingName(setting, alias=f"--{flag_to_key(source_name).replace('_', '-')}")
    value = SourceValue(name, meaning.value, source_kind, source_name)
    check_set_once(values, value)
    values[setting.key] = value
    shown = setting.value_type.show(value.value())
    return [f"{source_text}: taken as {setting.label} {shown}"]


def make_engine_config(**keywords: object) -> EngineConfig:
    """The engine's settings for Python keywords, over the environment, a file, a preset, defaults.

    `config=FILE` and `preset=NAME` are keywords too. Notes for the user are logged as warnings.
    raises: UsageError, for an unknown keyword with a suggestion
    """
    resolved = resolve_keywords(keywords)
    for note in resolved.notes:
        # A program may have no terminal that notes could be printed on.
        LOG.warning(log_event("configuration", note=note))
    return resolved.engine
