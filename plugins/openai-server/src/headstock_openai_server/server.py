"""The server process: it listens, loads, serves, drains and exits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

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
"""Seconds that a response may take after its request's deadline."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)

OnReady = Callable[[EngineSession], None]


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens on the server's address; early connections are answered later.

    raises: UsageError
    """
    try:
        return _listen_on_path(settings.uds) if settings.uds else _listen_on_port(settings)
    except OSError as error:
        where, flags = (
            (settings.uds, "--uds")
            if settings.uds
            else (f"{settings.host} port {settings.port}", "--host or --port")
        )
        raise UsageError(
            f"cannot listen on {where}: {error.strerror or error}; give another {flags}"
        ) from error


def _listen_on_port(settings: ServerSettings) -> socket.socket:
    """A listening TCP socket.   raises: OSError"""
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(socket.socket(family, kind, protocol))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        stack.pop_all()
    return bound


def _listen_on_path(path: str) -> socket.socket:
    """A listening Unix socket, in place of one that a dead server left.   raises: OSError"""
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        if _is_abandoned(path):
            os.unlink(path)
        bound.bind(path)
        bound.listen(BACKLOG)
        stack.pop_all()
    return bound


def _is_abandoned(path: str) -> bool:
    """Whether a Unix socket is there and nobody listens on it."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def describe_address(settings: ServerSettings, listener: socket.socket) -> str:
    """The URL for clients, or the path of the socket."""
    if settings.uds:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class EngineHost:
    """The engine of a service: starts its process, watches it, and ends it.

    engine_module: what the engine process runs
    log_levels: the lowest level that the engine process shows, and the lowest that it records
    failure: why the engine did not start or died
    ending: set once it has ended
    """

    def __init__(
        self,
        service: Service,
        *,
        engine_module: str = PROCESS_MODULE,
        log_levels: tuple[str, str] = ("INFO", "NOTSET"),
    ) -> None:
        self.engine_module = engine_module
        self.log_levels = log_levels
        self.service = service
        self.failure: HeadstockError | None = None
        self.ending: asyncio.Event = asyncio.Event()
        self.tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self, on_progress: OnProgress, on_ready: OnReady) -> None:
        """Start the engine, and watch it, as tasks of this event loop."""
        engine = asyncio.create_task(self._run_engine(on_progress, on_ready))
        self.tasks = engine, asyncio.create_task(self.service.sweep(self._kill_engine))

    async def close(self) -> None:
        """End the engine, and all that runs on it."""
        engine, sweeper = self.tasks
        sweeper.cancel()
        await self.service.close()
        engine.cancel()
        await asyncio.wait([engine])

    async def _run_engine(self, on_progress: OnProgress, on_ready: OnReady) -> None:
        """Start the engine, and wait until it ends."""
        service = self.service

        def note(stage: str, completed: int, total: int) -> None:
            service.note_progress(stage, completed, total)
            on_progress(stage, completed, total)

        try:
            loop = service.remote_loop = await connect_engine(note, self.engine_module)
            loop.start(service.config, *self.log_levels)
            session = await service.open_session(loop)
            gc.collect()  # as the engine process does: later collections look at requests alone
            gc.freeze()
            on_ready(session)
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

    def _kill_engine(self) -> None:
        """End an engine that has been silent for too long."""
        self.service.loop.process.kill()


class ServerProcess(EngineHost):
    """One run of a server, from its first connection to its end.

    raises: UsageError for certificates that cannot be used
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
        super().__init__(service, engine_module=engine_module, log_levels=log_levels)
        settings = service.settings
        self.listener = listener
        self.num_signals = 0
        config = uvicorn.Config(
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
            ssl_certfile=settings.ssl_certfile or None,
            ssl_keyfile=settings.ssl_keyfile or None,
            ssl_keyfile_password=settings.ssl_keyfile_password or None,
            ssl_ca_certs=settings.ssl_ca_certs or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
            raise UsageError(
                f"cannot use {', '.join(filter(None, files))} for https: "
                f"{error.strerror or error}; give PEM files, with the key of the certificate"
            ) from error
        self.http = HttpServer(config)

    async def run(self, on_progress: OnProgress, on_ready: OnReady) -> None:
        """Serve until a signal or the engine's end.

        It listens before the model loads, so that /health can report progress.
        raises: HeadstockError when the engine did not start or died
        """
        event_loop = asyncio.get_running_loop()
        for number in SIGNALS:
            event_loop.add_signal_handler(number, self._take_signal)
        http = asyncio.create_task(self.http.serve([self.listener]))
        self.start(on_progress, on_ready)
        try:
            await self.ending.wait()
            await self._drain(http)
        finally:
            for number in SIGNALS:
                event_loop.remove_signal_handler(number)
            await self.close()
        if self.failure is not None:
            raise self.failure

    def _take_signal(self) -> None:
        """Handle a signal: the first ends the server after draining, the second at once."""
        self.num_signals += 1
        self.ending.set()
        if self.num_signals > 1:
            self.http.force_exit = True
            self._stop_requests()

    def _stop_requests(self) -> None:
        self.service.stop_all(unavailable("the server is ending", "shutting_down"))

    async def _drain(self, http: asyncio.Task[None]) -> None:
        """Announce the end, accept no more connections, and let requests finish for a time."""
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
        """Wait, at most until a second signal."""
        end = asyncio.get_running_loop().time() + seconds
        while self.num_signals < 2 and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
