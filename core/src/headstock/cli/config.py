"""`headstock config`: the settings in effect and where each came from; the presets."""

from __future__ import annotations

import json
import os
import sys

from headstock.cli.notes import print_note
from headstock.cli.tables import print_table
from headstock.config.catalog import engine_settings, sampling_settings
from headstock.config.effective import ResolvedConfig
from headstock.config.flag_parser import FlagParser
from headstock.config.flags import add_engine_flags, add_sampling_flags, resolve_flags
from headstock.config.presets import PRESETS
from headstock.config.reference import render_page
from headstock.config.value_types import Value


def main(arguments: list[str]) -> int:
    """Run `headstock config ARGUMENTS` and return the exit code.

    raises: UsageError, ModelError
    """
    args = make_parser().parse_args(arguments)
    match args.verb:
        case "show":
            _show_settings(resolve_flags(args, os.environ), as_json=args.json)
        case "presets":
            _show_presets(as_json=args.json)
        case "reference":
            print(render_page(), end="")
    return 0


def make_parser() -> FlagParser:
    """The parser of `headstock config`."""
    root = FlagParser(
        prog="headstock config",
        usage="%(prog)s VERB [options]",
        description="Show the settings in effect, the source of each, and the presets.",
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")
    show = verbs.add_parser(
        "show", help="every setting, its value and its origin, under the flags given here"
    )
    presets = verbs.add_parser("presets", help="what each preset sets")
    for verb in (show, presets):
        verb.add_argument("--json", action="store_true", help="print JSON instead of text")
    verbs.add_parser("reference", help="all settings as a page in Markdown")
    add_engine_flags(show)
    add_sampling_flags(show)
    return root


def _show_settings(resolved: ResolvedConfig, *, as_json: bool) -> None:
    """Print the effective configuration."""
    if as_json:
        settings = {
            key: _setting_to_json(value, resolved.origins[key])
            for key, value in _list_effective_values(resolved).items()
        }
        print(json.dumps({"settings": settings, "notes": resolved.notes}, indent=2))
        return
    rows = [
        (key, _format_setting(key, value), resolved.origins[key])
        for key, value in _list_effective_values(resolved).items()
    ]
    print_table(("SETTING", "VALUE", "ORIGIN"), rows, sys.stdout)
    for line in resolved.notes:
        print_note(f"note: {line}")


def _list_effective_values(resolved: ResolvedConfig) -> dict[str, Value]:
    """The value of every setting by key; None for a sampling value that is left to the model."""
    engine = {
        key: getattr(resolved.engine, setting.name) for key, setting in engine_settings().items()
    }
    return engine | {key: resolved.sampling.get(key) for key in sampling_settings()}


def _setting_to_json(value: Value, origin: str) -> dict[str, object]:
    """One setting for JSON: `origin` is the kind of its source, `source` the name of that."""
    source_kind, _, source = origin.partition(" ")
    return {"value": value, "origin": source_kind, "source": source or None}


def _format_setting(key: str, value: Value) -> str:
    """A value as the table shows it."""
    if key in engine_settings():
        return engine_settings()[key].value_type.show(value) or "none"
    setting = sampling_settings()[key]
    return setting.default_text if value is None else setting.value_type.show(value)


def _format_preset_value(key: str, value: object) -> str:
    """A preset's value as the table shows it."""
    value_type = engine_settings()[key].value_type
    return value_type.show(value_type.read(value))


def _show_presets(*, as_json: bool) -> None:
    """Print what each preset sets."""
    if as_json:
        print(json.dumps({name: dict(values) for name, values in PRESETS.items()}, indent=2))
        return
    rows = [
        (name, key, _format_preset_value(key, value))
        for name, values in PRESETS.items()
        for key, value in values.items()
    ]
    print_table(("PRESET", "SETTING", "VALUE"), rows, sys.stdout)
