"""What may be put around the parts of an engine while it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headstock.spi import Program, Runner, ScheduleFunction

if TYPE_CHECKING:
    from headstock.execution.abstract_executor import Executor
    from headstock.execution.buffers import Buffers


class PartHooks:
    """Wraps four parts of an engine as they are built; each stays as it is.

    Tests override these methods to make a part fail or wait in a step of their choice.
    """

    def wrap_allocation(self, allocate: Callable[..., Buffers]) -> Callable[..., Buffers]:
        """Wrap what allocates the buffers that serve."""
        return allocate

    def wrap_scheduler(self, schedule: ScheduleFunction) -> ScheduleFunction:
        """Wrap the scheduler's function."""
        return schedule

    def wrap_runner(self, runner: Runner, program: Program) -> Runner:
        """Wrap the runner of `program`: that of the profile run, then that of the engine."""
        return runner

    def wrap_executor(self, executor: Executor) -> Executor:
        """Wrap the executor."""
        return executor


NO_HOOKS = PartHooks()
"""Leaves every part as it is, as all engines but those of tests do."""
