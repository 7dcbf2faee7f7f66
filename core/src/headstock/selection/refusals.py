"""What chosen plugins say to the question whether they can serve, and what options they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import PluginBroken, UsageError, describe_error, shorten
from headstock.selection.model_needs import AttentionNeeds
from headstock.spi import CannotRun, DeviceEnv, Ops, OpsSpec, PartQuery, PluginSpec, Rejection

_MAX_REASON = 300
"""Characters that a refusal shows of one plugin's reasons."""


def make_part_query(config: EngineConfig, needs: AttentionNeeds) -> PartQuery:
    """Make the query for the parts of an engine, before any of them is chosen."""
    return PartQuery(
        model=needs.model,
        dtype=needs.dtype,
        kv_dtype=needs.kv_dtype,
        formats=needs.formats,
        contiguous=needs.contiguous,
        max_rows=config.max_running_requests,
        max_batch_tokens=config.max_batch_tokens,
        max_seq_len=needs.max_seq_len,
    )


def note_part(query: PartQuery, kind: str, name: str) -> PartQuery:
    """Return the query for parts that are chosen after this one."""
    return evolve(query, parts={**query.parts, kind: name})


def check_resolve(spec: PluginSpec, flag: str, query: PartQuery | None, env: DeviceEnv) -> None:
    """Ask the plugin's own `resolve` whether it can serve; one without says yes.

    flag: that chose the plugin, for errors
    query: None for a command or a tool parser
    raises: CannotRun with its reasons; PluginBroken when it raises or answers something else
    """
    if spec.resolve is None:
        return
    function = registry.import_object(spec, spec.resolve)
    try:
        answer = function(query, env)
    except CannotRun as error:
        raise _refuse(spec, flag, str(error)) from error
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{registry.plugin_label(spec)}: its resolve raised "
            f"{describe_error(error)}; report it to its author"
        ) from error
    if answer is None or answer == ():
        return
    if not isinstance(answer, tuple | list) or not all(
        isinstance(item, Rejection) for item in answer
    ):
        raise PluginBroken(
            f"{registry.plugin_label(spec)}: resolve: expected None or a tuple of Rejections, got "
            f"{shorten(answer)}; report it to its author"
        )
    reasons = "; ".join(dict.fromkeys(item.message for item in answer))
    hints = dict.fromkeys(item.hint for item in answer if item.hint)
    raise _refuse(spec, flag, " ".join((f"{reasons}.", *hints)) if hints else reasons)


def _refuse(spec: PluginSpec, flag: str, reasons: str) -> CannotRun:
    """Make the error of a plugin that cannot serve, in one line."""
    return CannotRun(f"{flag} {spec.name} cannot serve here: {shorten(reasons, _MAX_REASON)}")


def check_claimed(served: frozenset[str] | None, who: str, name: str) -> None:
    """Raise CannotRun when the runner names what it runs, and not this.

    who: the runner and a verb
    """
    if served is not None and name not in served:
        raise CannotRun(
            f"{who} {' and '.join(sorted(served)) or 'nothing'} alone, and this is {name}; set "
            "it to eager"
        )


def configure_operations(
    spec: PluginSpec, operations: Ops, query: PartQuery, env: DeviceEnv
) -> None:
    """Let a set of operations learn what it will compute, before weights load.

    raises: CannotRun when it cannot, PluginBroken when it raises anything but ValueError
    """
    refused: Any = (CannotRun, ValueError)
    try:
        operations.configure(query, env)
    except refused as error:
        raise _refuse(spec, "ops (--ops)", str(error)) from error
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"ops (--ops) {spec.name}: its configure raised {describe_error(error)}; report it "
            "to its author"
        ) from error


def make_ops_options(spec: OpsSpec, tuned: Sequence[str], given: Sequence[str]) -> Any:
    """Make the options of operations: those that were measured, but what the user gives.

    raises: UsageError, PluginBroken
    """
    if tuned:
        try:
            registry.make_options(spec, tuned)
        except UsageError as error:
            raise UsageError(
                f"{error}; 'headstock tune' kept it: run it again, or set tuned_choices "
                "(--tuned-choices) to off"
            ) from error
    return registry.make_options(spec, (*tuned, *given))
