"""A replica: what `headstock serve` serves, without its listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ray import serve

from headstock.cli import start_logs
from headstock.errors import EngineDied
from headstock_openai_server.command import read_command
from headstock_openai_server.engine.service import Service
from headstock_openai_server.observe.access_log import AccessLog
from headstock_openai_server.observe.tracing import RequestTracer
from headstock_openai_server.routes.app import make_app
from headstock_openai_server.server import EngineHost
from headstock_ray.exchange import AppExchange, HttpHead, HttpRequest

REPLICA_HEADER = b"x-replica"
"""Which replica has answered."""


class Replica:
    """A server's application and its engine process, which ends with this one."""

    async def __init__(self, arguments: list[str]) -> None:  # type: ignore[misc]  # Ray awaits it
        self.name = serve.get_replica_context().replica_id.unique_id.encode()
        command = read_command(arguments)
        config, settings = command.resolved.engine, command.settings
        start_logs(command.resolved, quiet=command.options.quiet)
        self.service = Service(config, settings, command.resolved.sampling)
        self.access_log = AccessLog(settings.access_log)
        tracer = (
            RequestTracer(settings.otlp_endpoint, settings.model_names[0])
            if settings.otlp_endpoint
            else None
        )
        self.app = make_app(self.service, self.access_log, tracer)
        self.host = EngineHost(self.service, log_levels=(config.log_level, "NOTSET"))
        ready = asyncio.Event()
        self.host.start(lambda stage, completed, total: None, lambda session: ready.set())
        waits = [asyncio.ensure_future(each.wait()) for each in (ready, self.host.ending)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if self.host.failure is not None:
            raise self.host.failure

    async def answer(self, request: HttpRequest) -> AsyncIterator[HttpHead | bytes]:
        """The head of the answer, and its body in pieces."""
        async for part in AppExchange(self.app, request).read():
            if isinstance(part, HttpHead):
                part.headers.append((REPLICA_HEADER, self.name))
            yield part

    async def check_health(self) -> None:
        """Raise when Ray Serve must replace this replica."""
        trouble = self.service.find_trouble()
        if trouble is not None:
            raise EngineDied(trouble[1])

    async def __del__(self) -> None:
        """End the engine, once Ray Serve has let the last request finish."""
        await self.host.close()
        self.access_log.close()
