"""The routes' view of the engine: its health, its queue, and the requests of each client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from headstock import EngineConfig, HeadstockError, SamplingParams
from headstock.logs import log_event
from headstock.requests import EngineSession, PromptRequest
from headstock.text import import_transformers
from headstock_openai_server.api.errors import ApiError, busy, not_found, refuse, unavailable
from headstock_openai_server.engine.generation import ClientGoneError, Generation
from headstock_openai_server.engine.remote_engine import RemoteEngine, RemoteLoop
from headstock_openai_server.observe.history import History
from headstock_openai_server.observe.metrics import ServerMetrics
from headstock_openai_server.settings import ServerSettings

LOG = logging.getLogger("headstock.serve")

SWEEP_SECONDS = 1.0
PING_SECONDS = 15.0
"""Silence after which a stream sends a comment."""
QUEUED_POOLS = 4
"""Limit of waiting prompt tokens, as a multiple of the KV pool."""

Result = TypeVar("Result")


class Service:
    """One engine for all clients. Everything but `run_limited` work happens on the event loop.

    generations: the running ones
    num_sequences: answers that have not ended
    waiting_tokens: prompt tokens of answers before their first token
    """

    def __init__(
        self, config: EngineConfig, settings: ServerSettings, sampling: Mapping[str, object]
    ) -> None:
        self.config = config
        self.settings = settings
        self.sampling = sampling
        self.metrics = ServerMetrics(settings.metrics_prefix, settings.model_names[0], self)
        self.history = History()
        self.progress = ("start", 0, 0)
        self.remote_loop: RemoteLoop | None = None
        self.opened: EngineSession | None = None
        self.draining = False
        self.started = time.time()
        self.generations: set[Generation] = set()
        self.num_sequences = 0
        self.waiting_tokens = 0
        self.num_overdue = 0

    # the engine

    @property
    def loop(self) -> RemoteLoop:
        """The engine's loop, once it is connected."""
        assert self.remote_loop is not None, "internal error: no engine is connected"
        return self.remote_loop

    @property
    def session(self) -> EngineSession:
        """The session of the engine.   raises: ApiError while it loads and after its end"""
        self.check_serving()
        assert self.opened is not None, "internal error: a ready engine has a session"
        return self.opened

    @cached_property
    def default_params(self) -> SamplingParams:
        """The default parameters: flags, then the model's generation_config.json.

        raises: ApiError while the engine loads
        """
        return self.session.default_params.replace(self.sampling)

    @property
    def max_tokens(self) -> int | None:
        """The default max_tokens, if a flag sets it."""
        value = self.sampling.get("max_tokens")
        return value if isinstance(value, int) else None

    @property
    def is_alive(self) -> bool:
        """Whether an engine runs or is starting."""
        return self.remote_loop is None or not (
            self.remote_loop.has_ended or self.remote_loop.failure is not None
        )

    @property
    def silence(self) -> float:
        """Seconds since the engine's last message."""
        return 0.0 if self.remote_loop is None else time.monotonic() - self.remote_loop.last_heard

    def note_progress(self, stage: str, completed: int, total: int) -> None:
        """Record the progress of the start."""
        self.progress = (stage, completed, total)

    async def open_session(self, loop: RemoteLoop) -> EngineSession:
        """Wait for the engine of `loop` and open a session on it.   raises: HeadstockError"""
        # Chats need it. Importing it takes a second, while this process is idle anyway.
        importing = asyncio.create_task(asyncio.to_thread(import_transformers))
        ready = await loop.ready
        engine = RemoteEngine(ready, loop)
        await importing

        def open_session() -> EngineSession:
            session = EngineSession(self.config, lambda _: (engine, loop))
            try:
                session.prepare_chats()
            except BaseException:
                session.close()
                raise
            return session

        # The tokenizer takes half a second to load.
        self.opened = await asyncio.to_thread(open_session)
        # The first second counts from here.
        self.history.note(time.monotonic(), engine.stats(), self.metrics)
        return self.opened

    # health

    def find_trouble(self) -> tuple[str, str] | None:
        """The code and the text of the reason why the server is not ready; None if it is."""
        if not self.is_alive:
            return "engine_dead", "the engine has stopped; the server is ending"
        if self.draining:
            return "shutting_down", "the server is ending"
        if self.opened is None:
            return "loading", "the model is being loaded; try again soon"
        if self.silence > self.settings.watchdog:
            return "engine_stalled", f"the engine has been silent for {self.silence:.0f} s"
        return None

    def check_serving(self) -> None:
        """Raise ApiError (503) unless requests can be served."""
        trouble = self.find_trouble()
        # A silent engine may be compiling a kernel: requests wait, and /health reports it.
        if trouble is not None and trouble[0] != "engine_stalled":
            raise unavailable(trouble[1], trouble[0])

    def check_model(self, name: str | None) -> str:
        """Return a request's name of the model.   raises: ApiError (404)"""
        names = self.settings.model_names
        if name is not None and name not in names:
            raise not_found(
                f"the model {name[:64]!r} does not exist; served: {', '.join(names)}",
                "model",
                "model_not_found",
            )
        return name or names[0]

    # requests

    @contextlib.asynccontextmanager
    async def open_generation(
        self,
        prompt_requests: Sequence[PromptRequest],
        *,
        streams: bool,
        counts_output: bool = True,
        kind: type[Generation] = Generation,
    ) -> AsyncIterator[Generation]:
        """Submit the requests; they end with the context.

        raises: ApiError, RequestError, EngineDied
        """
        generation = await self.start_generation(
            prompt_requests, streams=streams, counts_output=counts_output, kind=kind
        )
        try:
            yield generation
        except BaseException as error:
            generation.close(error)
            raise
        generation.close()

    async def start_generation(
        self,
        prompt_requests: Sequence[PromptRequest],
        *,
        streams: bool,
        answer_id: str = "",
        counts_output: bool = True,
        kind: type[Generation] = Generation,
    ) -> Generation:
        """Submit the requests; the caller must close the generation.

        raises: ApiError, RequestError, EngineDied
        """
        self.check_serving()
        generation = kind(
            self,
            prompt_requests,
            streams=streams,
            answer_id=answer_id,
            counts_output=counts_output,
        )
        self.check_room(len(generation.live), sum(generation.unstarted.values()))
        self.num_sequences += len(generation.live)
        self.waiting_tokens += sum(generation.unstarted.values())
        self.generations.add(generation)
        try:
            await generation.submit()
        except BaseException as error:
            generation.close(error)
            raise
        return generation

    @property
    def max_sequences(self) -> int:
        """Maximum number of running and waiting answers."""
        return self.config.max_running_requests + self.config.max_queued_requests

    @property
    def max_waiting_tokens(self) -> int:
        """Maximum number of waiting prompt tokens."""
        pool = self.session.engine.summary.kv_tokens
        return int(self.settings.max_queued_tokens or QUEUED_POOLS * pool)

    def check_room(self, num_sequences: int, num_tokens: int) -> None:
        """Raise ApiError: 400 if the request never fits the queue, 429 if it does not fit now."""
        most, most_tokens = self.max_sequences, self.max_waiting_tokens
        if num_sequences > most:
            raise refuse(
                f"the request asks for {num_sequences} answers, and {most} may run and wait at "
                "once; send several requests",
                "n",
            )
        if num_tokens > most_tokens:
            raise refuse(
                f"the prompts have {num_tokens} tokens, and {most_tokens} may wait at once; send "
                "several requests",
                "prompt",
            )
        if self.num_sequences + num_sequences > most:
            raise busy(f"{self.num_sequences} of {most} answers run or wait; try again soon")
        if self.waiting_tokens + num_tokens > most_tokens:
            raise busy(f"{self.waiting_tokens} of {most_tokens} prompt tokens wait; try again soon")

    async def run_limited(self, work: Callable[[], Result]) -> Result:
        """Run `work` on another thread and return its result.

        raises: what it raises; ApiError (400) when it takes longer than a chat template may
        """
        task = asyncio.ensure_future(asyncio.to_thread(work))
        done, _ = await asyncio.wait([task], timeout=self.settings.template_timeout)
        if done:
            return task.result()
        # A thread cannot be killed: the server only stops waiting for it.
        self.num_overdue += 1
        task.add_done_callback(self._note_overdue_end)
        raise refuse("the chat template takes too long for these messages", "messages")

    def _note_overdue_end(self, task: asyncio.Task[Result]) -> None:
        self.num_overdue -= 1
        if not task.cancelled():
            task.exception()  # the result comes too late

    # background tasks

    async def sweep(self, on_silence: Callable[[], None]) -> None:
        """Stop stalled generations and those of unresponsive clients; keep silent streams alive;
        call `on_silence` for an unresponsive engine; sample the counts for the live view.

        It runs until it is cancelled.
        """
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            if self.opened is not None:
                self.history.note(now, self.opened.engine.stats(), self.metrics)
            for generation in list(self.generations):
                idle = now - generation.last_news
                # A whole answer only has two updates: its first token and its end.
                if generation.streams and idle > self.settings.idle_timeout:
                    generation.stop(ApiError(500, f"no token for {idle:.0f} s", code="timeout"))
                age, most = now - generation.arrival, self.settings.request_timeout
                if most and age > most:
                    text = f"the request took more than {most:g} s"
                    generation.stop(ApiError(500, text, code="timeout"))
                if now - generation.last_sent > PING_SECONDS:
                    generation.ping()
                began = generation.send_began
                if began is not None and now - began > self.settings.unread_timeout:
                    # Closing would wait until the client has read everything.
                    generation.abort_connection()
            if (
                self.opened is not None  # a start may be silent for minutes
                and self.is_alive
                and self.silence > self.settings.watchdog_exit
            ):
                LOG.critical(log_event("the engine is silent", seconds=round(self.silence)))
                on_silence()

    def abort(self, id: str) -> int:
        """Abort the generations with this answer or request; return how many there were."""
        # What is answered as a whole has an empty id.
        found = [each for each in self.generations if id and id in (each.answer_id, *each.choices)]
        for generation in found:
            generation.stop(ApiError(410, "the request was aborted", code="aborted"))
        return len(found)

    def stop_all(self, error: Exception) -> None:
        """End all running generations with `error`."""
        for generation in list(self.generations):
            generation.stop(error)

    async def close(self) -> None:
        """End the engine process and free its resources."""
        self.stop_all(ClientGoneError())
        if self.opened is not None:
            with contextlib.suppress(HeadstockError):
                await asyncio.to_thread(self.opened.close)
        elif self.remote_loop is not None:
            # It does not read messages while it loads, which may take minutes.
            self.remote_loop.kill()
