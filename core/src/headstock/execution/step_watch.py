"""What an executor tells of its steps to debug flags that watch them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from headstock.spi import Sample, Step


class StepWatch(ABC):
    """Watches the steps of one executor, in their order and on its thread."""

    @abstractmethod
    def begin(self, step: Step) -> None:
        """A step is about to run; the tables have its plan."""

    @abstractmethod
    def judge(self, sample: Sample, step: Step) -> Mapping[int, str]:
        """The step has been launched, and samples this.

        returns: by row, why its logits are not finite, as far as that is known
        raises: PluginBroken when the sample cannot be what was computed
        """

    @abstractmethod
    def close(self) -> None:
        """The executor ends; what was found is logged."""
