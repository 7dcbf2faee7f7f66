"""Configuration: attrs classes are the one truth; flags, environment, files and Python keywords follow from them."""

from headstock.config.engine import EngineConfig

__all__ = ["EngineConfig"]
