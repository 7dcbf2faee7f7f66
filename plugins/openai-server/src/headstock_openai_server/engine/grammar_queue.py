"""Requests with grammars, which are compiled outside the thread that receives messages."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headstock import StructuredOutputsParams
from headstock.logs import log_event
from headstock.requests import EngineLoop
from headstock_openai_server.engine.messages import FromEngine, Message, Refused, Submit

LOG = logging.getLogger("headstock.serve")

THREADS = 4
"""Grammars compiled at once. One that hangs occupies a thread for `--grammar-timeout`."""


class GrammarQueue:
    """Submits batches with grammars on its own threads, and answers each when it is done.

    `send` answers the server; any thread may call it.
    """

    # Compiling may take seconds; meanwhile requests must be received and aborted.

    def __init__(self, send: Callable[[Message], None], loop: EngineLoop) -> None:
        self.send = send
        self.loop = loop
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headstock-grammars")
        self.lock = threading.Lock()
        # Request that is not submitted yet -> whether it is aborted.
        self.pending: dict[str, bool] = {}

    @staticmethod
    def must_compile(message: Submit, engine: Any) -> bool:
        """Whether a grammar of the batch is not compiled yet."""
        # Compiled grammars must not wait behind slow ones.
        changed = [message.params, *(wire.params for wire in message.requests)]
        return any(
            not engine.preparation.has_compiled(
                StructuredOutputsParams(**params["structured_outputs"])
            )
            for params in changed
            if params.get("structured_outputs")
        )

    def submit(self, message: Submit, work: Callable[[], FromEngine]) -> None:
        """Make `work` submit the batch, and send its result."""
        with self.lock:
            self.pending.update(dict.fromkeys((wire.id for wire in message.requests), False))
        self.threads.submit(self._run, message, work)

    def _run(self, message: Submit, work: Callable[[], FromEngine]) -> None:
        """Submit a batch, on a thread of this queue."""
        try:
            answer = work()
        except Exception as error:  # otherwise the client would wait forever
            LOG.error(log_event("a batch was not submitted"), exc_info=error)
            answer = Refused(
                message.batch,
                "internal error; the log has the reason",
                None,
                capacity=False,
                retry=False,
            )
        with self.lock:
            aborted = [wire.id for wire in message.requests if self.pending.pop(wire.id, False)]
        for request_id in aborted:
            self.loop.abort(request_id)
        with contextlib.suppress(OSError):  # the server has exited
            self.send(answer)

    def note_aborts(self, ids: Iterable[str]) -> None:
        """Record aborted requests; those that are not submitted yet end on submission."""
        with self.lock:
            for request_id in ids:
                if request_id in self.pending:
                    self.pending[request_id] = True

    def close(self) -> None:
        """Stop submitting; running requests finish."""
        self.threads.shutdown(wait=False, cancel_futures=True)
