"""Configuration: attrs classes are the one truth; flags, environment, files and Python keywords
follow from them.
"""

from headstock.config.effective import ResolvedConfig, resolve_keywords
from headstock.config.engine import EngineConfig
from headstock.config.flags import FlagParser, add_engine_flags, add_sampling_flags, resolve_flags
from headstock.config.presets import PRESETS

__all__ = [
    "PRESETS",
    "EngineConfig",
    "FlagParser",
    "ResolvedConfig",
    "add_engine_flags",
    "add_sampling_flags",
    "resolve_flags",
    "resolve_keywords",
]
