"""Requests whose answers follow grammars, which are compiled beside the thread of messages."""

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
"""Grammars that are compiled at once. One that hangs keeps a thread for `--grammar-timeout`."""


class GrammarQueue:
    """Submits batches with a grammar on threads of its own, and answers each when it is done.

    `send` answers the server; any thread may call it.
    """

    # To compile may take seconds, in which other requests must arrive and others be aborted.

    def __init__(self, send: Callable[[Message], None], loop: EngineLoop) -> None:
        self.send = send
        self.loop = loop
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headstock-grammars")
        self.lock = threading.Lock()
        # Requests that are not submitted yet -> whether they are aborted.
        self.pending: dict[str, bool] = {}

    @staticmethod
    def must_compile(message: Submit, engine: Any) -> bool:
        """Whether the grammar of some answer of the batch is yet to be compiled."""
        # Those that are known must not wait behind others that take their time.
        changed = [message.params, *(wire.params for wire in message.requests)]
        return any(
            not engine.preparation.has_compiled(
                StructuredOutputsParams(**params["structured_outputs"])
            )
            for params in changed
            if params.get("structured_outputs")
        )

    def submit(self, message: Submit, work: Callable[[], FromEngine]) -> None:
        """Have `work` submit the batch, and send what it returns."""
        with self.lock:
            self.pending.update(dict.fromkeys((wire.id for wire in message.requests), False))
        self.threads.submit(self._run, message, work)

    def _run(self, message: Submit, work: Callable[[], FromEngine]) -> None:
        """Submit a batch, on a thread of this queue."""
        try:
            answer = work()
        except Exception as error:  # or the client would wait without end
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
        with contextlib.suppress(OSError):  # the server has gone
            self.send(answer)

    def note_aborts(self, ids: Iterable[str]) -> None:
        """Note requests that end; those that are not submitted yet end when they are."""
        with self.lock:
            for request_id in ids:
                if request_id in self.pending:
                    self.pending[request_id] = True

    def close(self) -> None:
        """Stop submitting; running requests finish."""
        self.threads.shutdown(wait=False, cancel_futures=True)
