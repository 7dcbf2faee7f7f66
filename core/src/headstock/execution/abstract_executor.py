"""Executors: where plans run, in this process or in several. Core's own, not a kind of plugin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from headstock.scheduler import Plan
from headstock.spi import Sample

NO_REASONS: Mapping[int, str] = MappingProxyType({})


class Pending(ABC):
    """A step that has been launched.

    is_replayed: it replays a graph, known once it has been waited for
    reasons: by row, what is wrong with it, of unhealthy rows; known as late, and only where debug
        flags look for it
    has_drafts: the model's own layers make drafts behind it; known as late
    """

    is_replayed: bool = False
    reasons: Mapping[int, str] = NO_REASONS
    has_drafts: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the sample is there, so that `wait` returns at once."""
        return True

    @abstractmethod
    def wait(self) -> Sample:
        """Wait for the device; return the step's sample, its tensors in host memory.

        Any exception fails the step's requests, and the engine goes on; EngineDied ends the
        engine.
        """

    def wait_drafts(self) -> Tensor:
        """Wait for the drafts that are made behind the sample. [rows, k] int64, in host memory

        raises: as `wait`
        """
        raise NotImplementedError("has_drafts says whether there are any")


class Executor(ABC):
    """Runs plans in the order of its calls; owns the device's buffers."""

    # In the order of the calls, because pages that a plan frees are given to later plans at once:
    # what those write must come after all that this plan's step reads.
    @abstractmethod
    def execute(self, plan: Plan, new_rows: Mapping[int, Any]) -> Pending:
        """Launch `plan`.

        new_rows: the `RequestState` of each row that the plan admits
        raises: as `Pending.wait`
        """

    def check_alive(self) -> None:
        """Raise EngineDied where the executor can run no more plans, while no step is due."""
        return

    def prepare_next(self) -> int:
        """Capture one graph, while no step is due; return how many sizes are still without."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Free the device; no call follows."""
