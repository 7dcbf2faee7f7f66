"""Executors: where plans are carried out (this process, or several)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from headstock.spi.plugin import PluginSpec


class Pending(ABC):
    """A step that has been launched."""

    @abstractmethod
    def wait(self) -> Any:
        """What the step sampled, as host arrays; blocks until the device is done."""


class Executor(ABC):
    """Carries out plans in the order given; owns the device's buffers."""

    @abstractmethod
    def execute(self, plan: Any, joined: Mapping[int, Any]) -> Pending:
        """Launch `plan`; `joined` holds, by row, what the device must know of the requests seated by it."""

    @abstractmethod
    def close(self) -> None:
        """Free the device. Nothing is executed afterwards."""


@frozen(kw_only=True)
class ExecutorSpec(PluginSpec):
    """An executor as its entry point returns it; `implementation` names an `Executor`."""
