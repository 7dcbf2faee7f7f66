"""The process of a server: it listens, loads, serves, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from headstock import EngineDied, HeadstockError, UsageError
from headstock.logs import log_event
from headstock.requests import EngineSession
from headstock_openai_server.api.errors import unavailable
from headstock_openai_server.engine.process_start import PROCESS_MODULE, connect_engine
from headstock_openai_server.engine.remote_engine import OnProgress
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.protocol import GuardedProtocol
from headstock_openai_server.observe.access_log import AccessLog
from headstock_openai_server.observe.tracing import RequestTracer
from headstock_openai_server.routes.app import make_app
from headstock_openai_server.settings import ServerSettings

LOG = logging.getLogger("headstock.serve")

BACKLOG = 2048
CLOSE_SECONDS = 5
"""How long a response may take after the last moment of its request."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)

OnReady = Callable[[EngineSession], None]


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signals: it would end the process with one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens on the server's address; who connects now is answered later.

    raises: UsageError
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; give "
            "another --host or --port"
        ) from error
    return bound


class ServerProcess:
    """One run of a server, from its first connection to its end.

    engine_module: what the engine process runs
    log_levels: the engine process shows log lines from the first, and none below the second
    """

    def __init__(
        self,
        service: Service,
        access_log: AccessLog,
        listener: socket.socket,
        *,
        tracer: RequestTracer | None = None,
        engine_module: str = PROCESS_MODULE,
        log_levels: tuple[str, str] = ("INFO", "NOTSET"),
    ) -> None:
        settings = service.settings
        self.engine_module = engine_module
        self.log_levels = log_levels
        self.service = service
        self.listener = listener
        self.failure: HeadstockError | None = None
        self.num_signals = 0
        self.ending: asyncio.Event = asyncio.Event()
        self.http = HttpServer(
            uvicorn.Config(
                make_app(service, access_log, tracer),
                http=partial(GuardedProtocol, settings=settings),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level=logging.CRITICAL,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=settings.keep_alive,
                timeout_graceful_shutdown=int(settings.drain_timeout) + CLOSE_SECONDS,
            )
        )

    async def run(self, on_progress: OnProgress, on_ready: OnReady) -> None:
        """Serve until a signal or the engine's end.

        It listens before the model loads, so that /health can tell.
        raises: HeadstockError when the engine did not start or died
        """
        self.on_progress, self.on_ready = on_progress, on_ready
        event_loop = asyncio.get_running_loop()
        for number in SIGNALS:
            event_loop.add_signal_handler(number, self._take_signal)
        http = asyncio.create_task(self.http.serve([self.listener]))
        engine = asyncio.create_task(self._run_engine())
        sweeper = asyncio.create_task(self.service.sweep(self._kill_engine))
        try:
            await self.ending.wait()
            await self._drain(http)
        finally:
            sweeper.cancel()
            for number in SIGNALS:
                event_loop.remove_signal_handler(number)
            await self.service.close()
            engine.cancel()
            await asyncio.wait([engine])
        if self.failure is not None:
            raise self.failure

    async def _run_engine(self) -> None:
        """Start the engine, and wait until it ends."""
        service = self.service

        def note(stage: str, completed: int, total: int) -> None:
            service.note_progress(stage, completed, total)
            self.on_progress(stage, completed, total)

        try:
            loop = service.remote_loop = await connect_engine(note, self.engine_module)
            loop.start(service.config, *self.log_levels)
            session = await service.open_session(loop)
            gc.collect()  # as the engine process does: later collections look at requests alone
            gc.freeze()
            self.on_ready(session)
            await loop.ended
            if not loop.closing:
                loop.check_alive()
        except HeadstockError as error:
            if not (service.remote_loop is not None and service.remote_loop.closing):
                self.failure = error
        except Exception as error:
            LOG.critical(log_event("the engine's connection failed"), exc_info=error)
            self.failure = EngineDied("internal error; the log has the reason")
        self.ending.set()

    def _take_signal(self) -> None:
        """End: after the drain at the first signal, at once at the second."""
        self.num_signals += 1
        self.ending.set()
        if self.num_signals > 1:
            self.http.force_exit = True
            self._stop_requests()

    def _kill_engine(self) -> None:
        """End an engine that has been silent for too long."""
        self.service.loop.process.kill()

    def _stop_requests(self) -> None:
        self.service.stop_all(unavailable("the server is ending", "shutting_down"))

    async def _drain(self, http: asyncio.Task[None]) -> None:
        """Announce the end, take no more connections, and let requests finish, for a time."""
        settings = self.service.settings
        self.service.draining = True
        running = len(self.service.generations)
        LOG.info(log_event("the server ends", running=running))
        if self.num_signals < 2 and settings.drain_delay:
            await self._wait_for_second_signal(settings.drain_delay)
        self.http.should_exit = True
        timer = asyncio.get_running_loop().call_later(settings.drain_timeout, self._stop_requests)
        try:
            await http
        finally:
            timer.cancel()

    async def _wait_for_second_signal(self, seconds: float) -> None:
        """Wait, but not longer than until a second signal."""
        end = asyncio.get_running_loop().time() + seconds
        while self.num_signals < 2 and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
