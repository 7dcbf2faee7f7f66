"""Step runners: how a step's forward pass and sampling are launched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from headstock.spi.attention import GraphSupport
from headstock.spi.environment import DeviceRange
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    from headstock.spi.batch import Batch, Sample
    from headstock.spi.model import Attend, Model, ModelConfig
    from headstock.spi.ops import Ops, Params


@frozen(kw_only=True)
class RunnerCapabilities:
    """Where the runner works and the least graph support it needs of the decode backend."""

    devices: tuple[DeviceRange, ...]
    needs_graph: GraphSupport


@frozen(kw_only=True)
class RunnerSpec(PluginSpec):
    """A runner as its entry point returns it; `implementation` names a `Runner`."""

    capabilities: RunnerCapabilities


@frozen(kw_only=True, eq=False)
class Program:
    """What a step computes: a model, its parameters and the operations they go through."""

    config: ModelConfig
    params: Params
    model: Model
    ops: Ops


class Runner(ABC):
    """Runs batches through a program."""

    @abstractmethod
    def __init__(self, program: Program) -> None:
        """A runner of `program`."""

    @abstractmethod
    def run(self, batch: Batch, attend: Attend) -> Sample:
        """What the batch's logit positions sample.

        writes: batch.pools
        """

    @abstractmethod
    def capture(self, report: Callable[[str], None]) -> int:
        """Record what can be replayed later; the bytes of device memory that this took."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was recorded."""
