"""`headstock plugins`: the installed plugins, the facts about one of them, and checks of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import attrs

from headstock import registry
from headstock.cli.notes import print_note
from headstock.cli.plugin_check import CHECK_EPILOG, check_plugin
from headstock.cli.process import reserve_output
from headstock.cli.tables import fold_line, print_table, terminal_width
from headstock.config.flag_parser import FlagParser
from headstock.errors import HeadstockError, UsageError, shorten
from headstock.registry import InstalledPlugin, UnusableEntry
from headstock.spi import SPI, PluginSpec, Require
from headstock.spi.versions import format_version

EPILOG = (
    "A plugin that is named alike in several kinds is asked for as KIND:NAME, such as cache:radix."
)


_MISMATCHED = "wrong contract"
"""The status of a plugin that was made for another version of the contract."""

_INCOMPLETE = "incomplete"
_HINT_TITLES: Mapping[str, str] = MappingProxyType(
    {
        _INCOMPLETE: "to complete them, on a machine with the device that they are for",
        _MISMATCHED: "made for another version of the contract, and refused when chosen",
    }
)
"""Status -> the title over the hints of its plugins."""
_BROKEN_TITLE = "broken, and of no use until they are repaired"
"""The title over the hints of all others."""


def main(arguments: list[str]) -> int:
    """Run `headstock plugins ARGUMENTS` and return the exit code.   raises: HeadstockError"""
    args = make_parser().parse_args(arguments)
    match args.verb:
        case "list":
            _show_list(args.group, as_json=args.json)
        case "check":
            return check_plugin(
                _find_plugin(args.name), args.device, opt=args.opt, as_json=args.json
            )
        case _:
            _show_plugin(_find_plugin(args.name), as_json=args.json)
    return 0


def make_parser() -> FlagParser:
    """The parser of `headstock plugins`."""
    about = "List the installed plugins, and describe or check one of them."
    root = FlagParser(prog="headstock plugins", usage="%(prog)s VERB ...", description=about)
    verbs = root.add_subparsers(
        prog="headstock plugins", dest="verb", required=True, metavar="VERB"
    )
    about = "every installed plugin, from metadata alone: no plugin code is run"
    listing = verbs.add_parser(
        "list", usage="%(prog)s [GROUP] [--json]", help=about, description=about
    )
    listing.add_argument(
        "group", nargs="?", metavar="GROUP", help=f"only one kind: {', '.join(SPI)}"
    )
    inspection = verbs.add_parser(
        "inspect", help="one plugin: spec, capabilities, requirements, options", epilog=EPILOG
    )
    inspection.add_argument("name", metavar="NAME")
    about = "run the cases of the contract that a plugin's claims ask for"
    checking = verbs.add_parser(
        "check",
        usage="%(prog)s NAME [--device DEVICE] [--opt NAME.FIELD=VALUE] [--json]",
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"{CHECK_EPILOG} {EPILOG}",
    )
    checking.add_argument("name", metavar="NAME")
    checking.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run them"
    )
    checking.add_argument(
        "--opt",
        action="append",
        default=[],
        metavar="NAME.FIELD=VALUE",
        help="an option of the plugin; may be repeated",
    )
    for verb in (listing, inspection, checking):
        verb.add_argument("--json", action="store_true", help="print JSON instead of text")
    return root


def _find_plugin(name: str) -> InstalledPlugin:
    """The installed plugin of that name, `[KIND:][DISTRIBUTION:]NAME`.

    raises: UsageError for a name of none, or of several kinds
    """
    head, _, rest = name.partition(":")
    if rest and head in SPI:
        return registry.find_plugin(head, rest)
    plain = name.rpartition(":")[2]
    kinds = sorted({plugin.kind for plugin in registry.list_installed() if plugin.name == plain})
    if len(kinds) > 1:
        choices = " or ".join(f"{kind}:{name}" for kind in kinds)
        raise UsageError(f"{name!r} is the name of several plugins; ask for {choices}")
    if not kinds:
        raise registry.unknown_name_error(name)
    return registry.find_plugin(kinds[0], name)


def _show_list(kind: str | None, *, as_json: bool) -> None:
    """Print the installed plugins, what some of them lack, and what is broken.

    raises: UsageError for a kind that does not exist
    """
    rows = [
        _make_row(plugin, registry.explain_missing_extras(plugin))
        for plugin in registry.list_installed(kind)
    ]
    rows += map(_make_unusable_row, registry.list_unusable(kind))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    header = ("KIND", "NAME", "DISTRIBUTION", "VERSION", "TARGET", "STATUS")
    width = terminal_width(sys.stdout)
    # Hints are long. A terminal shows them below the table; a pipe gets one line a plugin.
    state = _format_status if width is None else itemgetter("status")
    cells = [
        (*(_format_cell(row[title.lower()]) for title in header[:-1]), state(row)) for row in rows
    ]
    print_table(header, cells, sys.stdout, spare=("TARGET", "VERSION", "DISTRIBUTION"))
    if width is not None:
        _show_hints(rows, width)
    # The list reads metadata alone, which says nothing of this machine.
    print_note("'headstock doctor' shows which of these can run on this machine")


def _show_hints(rows: Sequence[dict[str, str]], width: int) -> None:
    """Print the next move for each plugin that has one, in lines of `width`."""
    for status in (*_HINT_TITLES, None):
        hints = {
            _format_cell(f"{row['kind']} {row['name']}".strip() or row["distribution"]): row["hint"]
            for row in rows
            if row["hint"] and (row["status"] if row["status"] in _HINT_TITLES else None) == status
        }
        widest = max(map(len, hints), default=0)
        if hints:
            print(f"\n{_HINT_TITLES.get(status or '', _BROKEN_TITLE)}:")
        for name, hint in hints.items():
            print(fold_line(f"  {name:{widest}}  {hint}", width, widest + 4))


def _make_row(plugin: InstalledPlugin, hint: str) -> dict[str, str]:
    """A plugin for JSON; `hint` is the command that completes its distribution, or else "".

    A plugin of another contract version has the refusal's line instead of the hint.
    """
    row: dict[str, str] = attrs.asdict(plugin)
    if plugin.status != "ok":
        return row | {"hint": registry.explain_unusable(plugin) or hint}
    if mismatch := registry.find_mismatch(plugin):
        return row | {"status": _MISMATCHED, "hint": mismatch}
    if absent := registry.explain_absent_module(plugin):
        remedy = f"repair it or remove it with: pip uninstall {plugin.distribution}"
        return row | {"status": "no module", "hint": f"{absent}; {remedy}"}
    return row | {"status": _INCOMPLETE if hint else "ok", "hint": hint}


def _make_unusable_row(entry: UnusableEntry) -> dict[str, str]:
    """An entry point that is not a plugin, or an unreadable file of them, for JSON."""
    row: dict[str, str] = attrs.asdict(entry)
    return {"hint" if key == "reason" else key: value for key, value in row.items()}


def _format_cell(text: str) -> str:
    """A text of anyone's on one line, without what would steer a terminal."""
    return shorten("".join(each if each.isprintable() else "?" for each in text), 80)


def _format_status(row: dict[str, str]) -> str:
    """A plugin's status as the table shows it."""
    return f"{row['status']}: {row['hint']}" if row["hint"] else row["status"]


def _show_plugin(plugin: InstalledPlugin, *, as_json: bool) -> None:
    """Print what one plugin claims.   raises: PluginBroken, SpiMismatch"""
    with reserve_output(as_json):
        facts = _describe_plugin(plugin)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = terminal_width(sys.stdout)
    for title, value in facts.items():
        if isinstance(value, dict):
            print(f"\n{title}")
            widest = max(map(len, value), default=0)
            for name, fact in value.items():
                text = _format_option(fact) if title == "options" else _format_fact(fact)
                print(fold_line(f"  {name:{widest}}  {text}", width, widest + 4).rstrip())
            if not value:
                print("  none")
        else:
            print(fold_line(f"{title:16}{_format_fact(value)}", width, 16))


def _describe_plugin(plugin: InstalledPlugin) -> dict[str, object]:
    """The facts about a plugin: its metadata, its spec, and what it lacks here, as plain values."""
    # With the distribution: a name that two provide is ambiguous only without it.
    spec = registry.load_spec(plugin.kind, f"{plugin.distribution}:{plugin.name}")
    facts = {
        "name": plugin.name,
        "kind": plugin.kind,
        "provided by": f"{plugin.distribution} {plugin.version}",
        "target": plugin.target,
        "summary": spec.summary,
        "contract": f"{plugin.kind} {spec.spi}, offered {format_version(SPI[plugin.kind])}: ok",
    }
    if not isinstance(spec, PluginSpec):
        return facts | {"directory": spec.directory}
    capabilities = getattr(spec, "capabilities", None)
    return facts | {
        "implementation": spec.implementation,
        "this machine": _describe_support(spec),
        "capabilities": _list_fields(capabilities) if capabilities is not None else {},
        "requires": {need.distribution: _format_requirement(need) for need in spec.requires},
        "missing": _list_missing(plugin, spec),
        "options": _list_option_defaults(spec),
    }


def _list_missing(plugin: InstalledPlugin, spec: PluginSpec) -> dict[str, str]:
    """Missing requirement -> what installs it; without one, what installs the missing kernels."""
    required = {problem.message: problem.hint for problem in registry.find_missing(spec)}
    hint = registry.explain_missing_extras(plugin)
    return required or ({"kernels for its device": hint} if hint else {})


def _describe_support(spec: PluginSpec) -> str:
    """Whether the plugin serves this machine's device, as far as its spec says."""
    try:
        # deferred for start-up time: it imports torch, which may not even be importable here
        from headstock.selection.capabilities import explain_device_mismatch
        from headstock.startup.device import describe_device

        reason = explain_device_mismatch(spec, describe_device("auto"))
    except (ImportError, OSError):
        return "unknown: torch cannot be imported"
    return f"cannot: {reason}; 'headstock doctor' says what can" if reason else "can"


def _list_fields(record: Any) -> dict[str, object]:
    """The fields of an attrs record as plain values."""
    return {
        field.name: _to_plain(getattr(record, field.name)) for field in attrs.fields(type(record))
    }


def _to_plain(value: object) -> object:
    """`value` made of strings, numbers, booleans, None and lists."""
    if isinstance(value, Enum):
        return value.name.lower() if isinstance(value, int) else value.value
    if isinstance(value, frozenset):
        return sorted((_to_plain(item) for item in value), key=str)
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _format_requirement(need: Require) -> str:
    """A requirement, and the version that is installed."""
    if need.any_of:
        return "one of: " + "; ".join(
            f"{alternative.distribution} {_format_requirement(alternative)}"
            for alternative in need.any_of
        )
    installed = registry.find_version(need.distribution) or "nothing"
    return f"expected {need.version or 'any version'}, got {installed}"


def _list_option_defaults(spec: PluginSpec) -> dict[str, object]:
    """The plugin's options with their defaults, or the reason why they cannot be shown."""
    try:
        record = registry.make_options(spec)
    except HeadstockError as error:
        return {"cannot be shown": str(error)}
    return {} if record is None else _list_fields(record)


def _format_option(value: object) -> str:
    """A default as `--opt` reads it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else _format_fact(value)


def _format_fact(value: object) -> str:
    """`value` for a terminal."""
    if isinstance(value, list):
        return (
            ", ".join(
                "/".join(map(str, item)) if isinstance(item, list) else str(item) for item in value
            )
            or "none"
        )
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value)
