"""Connect the devices of ranks while weights load."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from headstock.callbacks import ProgressCallback
from headstock.spi import Collectives, Ranks


class JoiningRanks:
    """The devices of ranks, which a thread connects: a rank that loads need not wait for others.

    joined: done when they are connected, or cannot be
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self.joined: Future[Collectives] = Future()
        if ranks.count == 1:
            self._join()
            return
        if device.type == "cuda":
            # A new thread has the first GPU, whichever is this rank's.
            self.device = torch.device("cuda", torch.cuda.current_device())
        # One that can be left: it waits for ranks, also for those that have ended.
        threading.Thread(target=self._join, daemon=True, name="headstock-join").start()

    def _join(self) -> None:
        """Connect the devices, or note why they cannot be."""
        try:
            if self.device.index is not None:
                torch.cuda.set_device(self.device)
            self.joined.set_result(self.ranks.join(self.device))
        except BaseException as error:
            self.joined.set_exception(error)

    def wait(self) -> Collectives:
        """Wait until the devices are connected.   raises: what `Ranks.join` raises"""
        return self.joined.result()

    def watch(self, on_progress: ProgressCallback | None) -> ProgressCallback:
        """A report of progress that raises what `Ranks.join` has raised, as soon as it has."""

        def report(stage: str, completed: int, total: int) -> None:
            if self.joined.done():
                self.wait()
            if on_progress is not None:
                on_progress(stage, completed, total)

        return report
