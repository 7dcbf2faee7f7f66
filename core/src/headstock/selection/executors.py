"""Select what starts the ranks of a model."""

from __future__ import annotations

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import UsageError, shorten, suggest_name
from headstock.spi import ExecutorSpec

INLINE = "inline"
"""The executor of one rank, which runs steps in the engine's process; no plugin."""

_DEFAULT = "multiprocess"
"""What `--executor auto` means for several ranks."""


def select_executor(config: EngineConfig) -> ExecutorSpec | None:
    """Select the executor that the configuration names; None for one rank in this process.

    raises: UsageError, UnknownPlugin, PluginBroken, SpiMismatch, CannotRun
    """
    name = config.executor
    if name == "auto":
        name = INLINE if config.tp == 1 else _DEFAULT
    if name == INLINE and config.tp > 1:
        raise UsageError(
            f"executor (--executor) {INLINE} has one rank, and tp (--tp) is {config.tp}; set the "
            "executor to auto"
        )
    if name == INLINE:
        return None
    names = (INLINE, *(plugin.name for plugin in registry.list_installed("executor")))
    if name not in names and name != _DEFAULT:
        raise UsageError(
            f"executor (--executor): expected one of auto, {', '.join(names)}, got {shorten(name)}"
            f"{suggest_name(name, names)}"
        )
    spec: ExecutorSpec = registry.load_spec("executor", name)
    registry.require_installed(spec)
    return spec
