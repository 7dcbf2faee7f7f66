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
        """What the step sampled, on the host, as a `headstock.execution.executor.Outcome`;
        blocks until the device is done.

        Whatever it raises fails the step's requests, and the engine goes on; EngineDied ends the
        engine.
        """


class Executor(ABC):
    """Carries out plans in the order given; owns the device's buffers.

    It is made as `(buffers=, sampling=, runner=, router=)`, parts of core that the contract does
    not describe yet: an executor goes with the core that it was written for.
    """

    @abstractmethod
    def execute(self, plan: Any, joined: Mapping[int, Any]) -> Pending:
        """Launch `plan`, a `headstock.scheduler.Plan`; `joined` holds the `Entry` of each row that
        it seats.

        What it raises counts as in `Pending.wait`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the device. Nothing is executed afterwards."""


@frozen(kw_only=True)
class ExecutorSpec(PluginSpec):
    """An executor as its entry point returns it; `implementation` names an `Executor`."""
