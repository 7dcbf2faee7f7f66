"""An executor on its own thread, so that the host plans the next step while a CPU runs this one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from headstock.execution.abstract_executor import Executor, Pending
from headstock.spi import Sample

Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
"""A call for the thread: where its result goes, the function, its arguments."""


class QueuedStep(Pending):
    """A step that was handed to the thread."""

    def __init__(self, future: Future[tuple[Sample, Pending]]) -> None:
        self.future = future

    def wait(self) -> Sample:
        """Wait for the sample; raises what the step raised."""
        sample, step = self.future.result()
        self.is_replayed, self.reasons = step.is_replayed, step.reasons
        self.has_drafts = step.has_drafts
        return sample

    def wait_drafts(self) -> Tensor:
        """See `Pending.wait_drafts`."""
        return self.future.result()[1].wait_drafts()


class ThreadedExecutor(Executor):
    """Runs plans with `inner` on one thread, in order, as a GPU's stream does.

    One thread and not more: pages that are freed are given to later steps at once, which is safe
    only if steps run in the order of their launch. The thread ends with `close`, when the executor
    is dropped, and before the interpreter does.
    """

    # No ThreadPoolExecutor: it takes no step once the main thread has ended, and threads of a
    # script may stream on then.

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.calls: SimpleQueue[Call | None] = SimpleQueue()
        # The thread refers to the queue alone, so that an executor that is dropped can end it.
        self.thread = threading.Thread(
            target=_run_calls, args=(self.calls,), name="headstock-device", daemon=True
        )
        self.thread.start()
        weakref.finalize(self, _end_thread, self.calls, self.thread)

    def execute(self, plan: Any, new_rows: Mapping[int, Any]) -> QueuedStep:
        """Queue `plan` behind the earlier ones."""
        return QueuedStep(self._queue(self._run, plan, new_rows))

    def _run(self, plan: Any, new_rows: Mapping[int, Any]) -> tuple[Sample, Pending]:
        """Run one plan to its end, on the thread; return its sample and the step."""
        # The wait is part of the step: it cleans the pages of failed rows by the page tables, which
        # the next plan changes when it is executed.
        pending = self.inner.execute(plan, new_rows)
        return pending.wait(), pending

    def check_alive(self) -> None:
        """See `Executor.check_alive`."""
        self.inner.check_alive()

    def prepare_next(self) -> int:
        """Capture one graph on the thread; return how many sizes are still without."""
        num_left: int = self._queue(self.inner.prepare_next).result()
        return num_left

    def _queue(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call for the thread."""
        future: Future[Any] = Future()
        self.calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Finish the queue and free the device."""
        _end_thread(self.calls, self.thread)
        self.inner.close()


def _run_calls(calls: SimpleQueue[Call | None]) -> None:
    """Run the calls of the queue in their order, up to a None."""
    while (call := calls.get()) is not None:
        future, function, arguments = call
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # even SystemExit, from a plugin: the engine waits for it
            future.set_exception(error)
        # While it waits for the next call, the thread keeps nothing of this one alive.
        del call, future, function, arguments


def _end_thread(calls: SimpleQueue[Call | None], thread: threading.Thread) -> None:
    """Have the thread end after the calls that are queued, and wait for it."""
    calls.put(None)
    # The garbage collector may drop an executor on its own thread.
    if thread is not threading.current_thread():
        thread.join()
