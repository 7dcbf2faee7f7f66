"""An executor on its own thread, so that the host plans the next step while a CPU runs this one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headstock.execution.abstract_executor import Executor, Pending
from headstock.spi import Sample


class QueuedStep(Pending):
    """A step that was handed to the thread."""

    def __init__(self, future: Future[tuple[Sample, Pending]]) -> None:
        self.future = future

    def wait(self) -> Sample:
        """Wait for the sample; raises what the step raised."""
        sample, step = self.future.result()
        self.is_replayed, self.reasons = step.is_replayed, step.reasons
        return sample


class ThreadedExecutor(Executor):
    """Runs plans with `inner` on one thread, in order, as a GPU's stream does.

    One thread and not more: pages that are freed are given to later steps at once, which is safe
    only if steps run in the order of their launch.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="headstock-device")

    def execute(self, plan: Any, new_rows: Mapping[int, Any]) -> QueuedStep:
        """Queue `plan` behind the earlier ones."""
        return QueuedStep(self.thread.submit(self._run, plan, new_rows))

    def _run(self, plan: Any, new_rows: Mapping[int, Any]) -> tuple[Sample, Pending]:
        """Run one plan to its end, on the thread; return its sample and the step."""
        # The wait is part of the step: it cleans the pages of failed rows by the page tables, which
        # the next plan changes when it is executed.
        pending = self.inner.execute(plan, new_rows)
        return pending.wait(), pending

    def capture_next(self) -> int:
        """Capture one graph on the thread; return how many sizes are still without."""
        return self.thread.submit(self.inner.capture_next).result()

    def close(self) -> None:
        """Finish the queue and free the device."""
        self.thread.shutdown(wait=True)
        self.inner.close()
