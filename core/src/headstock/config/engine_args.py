"""`EngineArgs`, for scripts of vLLM: the settings of an engine as one value, and as flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headstock.config.catalog import engine_settings
from headstock.config.equivalents import SAME, TAKEN
from headstock.config.flags import read_foreign
from headstock.config.setting import Setting
from headstock.config.value_types import InvalidValue, Repeated, Switch


class EngineArgs:
    """Keywords of `LLM`, which takes them as `LLM(**vars(args))`.

    What they are is checked by `LLM`.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.__dict__ |= settings if model is None else {"model": model, **settings}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each setting, with vLLM's names too; return the parser.

        The parsed namespace has those alone that were given or that `set_defaults` set.
        """
        for setting in engine_settings().values():
            _add_flag(parser, setting)
        for name in sorted({*SAME, *TAKEN}):
            dashed = name.replace("_", "-")
            options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            options |= {"nargs": "?", "const": True, "type": read_foreign}
            parser.add_argument(f"--{dashed}", help=argparse.SUPPRESS, **options)
            off: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            off["action"] = "store_false"
            parser.add_argument(f"--no-{dashed}", help=argparse.SUPPRESS, **off)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The settings among parsed arguments; others are left out."""
        known = {setting.name for setting in engine_settings().values()} | {*SAME, *TAKEN}
        return cls(**{name: value for name, value in vars(args).items() if name in known})

    def __repr__(self) -> str:
        return f"EngineArgs({', '.join(f'{name}={each!r}' for name, each in vars(self).items())})"


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """Add the flag of a setting, under all of its names, and its negative."""
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    value: dict[str, Any] = {"type": _make_reader(setting), "help": argparse.SUPPRESS}
    if isinstance(setting.value_type, Repeated):
        value["action"] = "append"
    if isinstance(setting.value_type, Switch):
        value |= {"nargs": "?", "const": True}
    parser.add_argument(setting.flag, *setting.aliases, **options, **value)
    if setting.negative is not None:
        off: dict[str, Any] = {"action": "store_false", "help": argparse.SUPPRESS}
        parser.add_argument(setting.negative, **options, **off)


def _make_reader(setting: Setting) -> Callable[[str], Any]:
    """Reads the text of a flag for argparse."""

    def read(text: str) -> Any:
        if isinstance(setting.value_type, Repeated):
            return text
        try:
            return setting.value_type.read(text)
        except InvalidValue as broken:
            raise argparse.ArgumentTypeError(str(broken)) from None

    return read
