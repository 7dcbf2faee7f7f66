"""An executor on a thread of its own, so that the next step is planned while this one runs on a
CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headstock.spi import Executor, Pending


class Promised(Pending):
    """A step handed to the thread."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self) -> Any:
        """What the step sampled; raises what the step raised."""
        return self.future.result()


class WorkerThread(Executor):
    """Carries out plans with `inner` on one thread, in the order given: what a device's stream does
    by itself.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="headstock-device")

    def execute(self, plan: Any, joined: Mapping[int, Any]) -> Promised:
        """Queue `plan` behind those given before."""
        return Promised(self.thread.submit(self.run, plan, joined))

    def run(self, plan: Any, joined: Mapping[int, Any]) -> Any:
        """Carry out one plan; runs on the thread."""
        return self.inner.execute(plan, joined).wait()

    def close(self) -> None:
        """Finish what is queued and free the device."""
        self.thread.shutdown(wait=True)
        self.inner.close()
