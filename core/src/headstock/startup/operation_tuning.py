"""Let a set of operations measure its own options, for `headstock tune`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import (
    PLUGIN_FAILURES,
    HeadstockError,
    PluginBroken,
    describe_error,
    shorten,
)
from headstock.selection import auto_choices
from headstock.selection.model_needs import (
    AttentionNeeds,
    find_attention_needs,
    resolve_model_dtype,
)
from headstock.selection.refusals import make_part_query, note_part
from headstock.selection.select import select_plugins
from headstock.spi import DeviceEnv, OpsSpec
from headstock.startup.model_loading import locate_model, read_family, resolve_max_seq_len


def tune_operations(config: EngineConfig, env: DeviceEnv) -> tuple[str, ...]:
    """Let the operations that `config` names measure their options for its model; no weights load.

    returns: the options, each as `--opt` has it
    raises: UsageError, ModelError, CannotRun; PluginBroken when measuring fails, or finds what is
        no option
    """
    needs = _read_needs(config, env)
    parts = select_plugins(config, env, needs)
    query = note_part(make_part_query(config, needs), "attention", parts.attention_name)
    try:
        found = parts.operations.tune(query, env)
    except HeadstockError:
        raise
    except PLUGIN_FAILURES as error:
        raise PluginBroken(
            f"ops (--ops) {parts.ops.name}: its tune raised {describe_error(error)}; report it "
            "to its author"
        ) from error
    return _make_assignments(parts.ops, found)


def list_attention_candidates(config: EngineConfig, env: DeviceEnv) -> tuple[str, ...]:
    """List the values of `--attn` to measure for the model that `config` names.

    Where its KV groups have several shapes, each backend of the list has the others after it, for
    the groups that it does not serve.

    raises: UsageError, ModelError
    """
    if config.attn != "auto":
        return (config.attn,)
    needs = _read_needs(config, env)
    names = auto_choices.list_attention_names(env, needs.kv_dtype)
    if len(needs.split_groups()) == 1:
        return names
    return tuple("+".join(auto_choices.move_to_front(names, name)) for name in names)


def _read_needs(config: EngineConfig, env: DeviceEnv) -> AttentionNeeds:
    """Read what the model asks of its parts.   raises: UsageError, ModelError"""
    directory = locate_model(config.model, revision=config.revision)
    read = read_family(directory, config.model_family, config.opt, config.model_impl)
    dtype = resolve_model_dtype(config.dtype, read.config, env)
    max_len = resolve_max_seq_len(config, read.config, [])
    return find_attention_needs(config, read.config, dtype, max_len, read.formats)


def _make_assignments(spec: OpsSpec, found: Any) -> tuple[str, ...]:
    """The options as `--opt` has them, once the plugin's own class has taken them."""
    wrong = f"ops (--ops) {spec.name}: tune: expected texts by option, got {shorten(found)}"
    if not isinstance(found, Mapping):
        raise PluginBroken(wrong)
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise PluginBroken(wrong)
    assignments = tuple(f"{spec.name}.{name}={text}" for name, text in found.items())
    try:
        registry.make_options(spec, assignments)
    except HeadstockError as error:
        raise PluginBroken(
            f"ops (--ops) {spec.name}: its tune found options that it refuses: {error}"
        ) from error
    return assignments
