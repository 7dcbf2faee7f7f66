"""Configuration: attrs classes from which flags, environment, file keys and keywords are made.

Names are imported when they are first used: verbs that take no settings start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstock.config.effective import ResolvedConfig, make_engine_config, resolve_keywords
    from headstock.config.engine import EngineConfig
    from headstock.config.engine_args import EngineArgs
    from headstock.config.flag_parser import FlagParser
    from headstock.config.flags import add_engine_flags, add_sampling_flags, resolve_flags
    from headstock.config.presets import PRESETS

__all__ = [
    "PRESETS",
    "EngineArgs",
    "EngineConfig",
    "FlagParser",
    "ResolvedConfig",
    "add_engine_flags",
    "add_sampling_flags",
    "make_engine_config",
    "resolve_flags",
    "resolve_keywords",
]

_HOMES = {
    "PRESETS": "headstock.config.presets",
    "EngineArgs": "headstock.config.engine_args",
    "EngineConfig": "headstock.config.engine",
    "FlagParser": "headstock.config.flag_parser",
    "ResolvedConfig": "headstock.config.effective",
    "add_engine_flags": "headstock.config.flags",
    "add_sampling_flags": "headstock.config.flags",
    "make_engine_config": "headstock.config.effective",
    "resolve_flags": "headstock.config.flags",
    "resolve_keywords": "headstock.config.effective",
}


def __getattr__(name: str) -> object:
    """The exported name, from the module where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headstock.config' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
