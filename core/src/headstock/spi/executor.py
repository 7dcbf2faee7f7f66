"""Executors: where plans run, in this process or in several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from headstock.spi.batch import Sample
from headstock.spi.plugin import PluginSpec


class Pending(ABC):
    """A step that has been launched."""

    @abstractmethod
    def wait(self) -> Sample:
        """Wait for the device; return the step's sample, its tensors in host memory.

        Any exception fails the step's requests, and the engine goes on; EngineDied ends the
        engine.
        """


class Executor(ABC):
    """Runs plans in the order of its calls; owns the device's buffers.

    It is made as `(buffers=, sampling=, runner=, router=)`. The contract does not describe these
    parts of core yet, so an executor fits only the core that it was written for.
    """

    # In the order of the calls, because pages that a plan frees are given to later plans at once:
    # what those write must come after all that this plan's step reads.
    @abstractmethod
    def execute(self, plan: Any, new_rows: Mapping[int, Any]) -> Pending:
        """Launch `plan`, a `headstock.scheduler.Plan`.

        new_rows: the `RequestState` of each row that the plan admits
        raises: as `Pending.wait`
        """

    @abstractmethod
    def close(self) -> None:
        """Free the device; no call follows."""


@frozen(kw_only=True)
class ExecutorSpec(PluginSpec):
    """An executor as its entry point returns it; `implementation` names an `Executor`."""
