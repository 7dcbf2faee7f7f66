"""Configuration: attrs classes from which flags, environment, file keys and keywords are made."""

from headstock.config.effective import ResolvedConfig, make_engine_config, resolve_keywords
from headstock.config.engine import EngineConfig
from headstock.config.flags import FlagParser, add_engine_flags, add_sampling_flags, resolve_flags
from headstock.config.presets import PRESETS
from headstock.config.spelling import Surface, name_parameters

__all__ = [
    "PRESETS",
    "EngineConfig",
    "FlagParser",
    "ResolvedConfig",
    "Surface",
    "add_engine_flags",
    "add_sampling_flags",
    "make_engine_config",
    "name_parameters",
    "resolve_flags",
    "resolve_keywords",
]
