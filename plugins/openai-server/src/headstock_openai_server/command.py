"""`headstock serve`: a model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from attrs import frozen

from headstock.cli import ProgressBars, print_note, print_summary, start_logs
from headstock.config import (
    FlagParser,
    ResolvedConfig,
    add_engine_flags,
    add_sampling_flags,
    resolve_flags,
)
from headstock.errors import HeadstockError, RequestError, UsageError
from headstock.logs import show_library_logs
from headstock_openai_server.settings import (
    ServerSettings,
    add_server_flags,
    check_defaults,
    read_settings,
)

if TYPE_CHECKING:
    from headstock.requests import EngineSession

COMMON_FLAGS = (
    *("--verbose", "--quiet", "--host", "--port", "--api-key", "--served-model-name"),
    *("--allow-origins", "--allowed-hosts", "--config", "--model", "--quant", "--device"),
    *("--dtype", "--max-seq-len", "--chat-template", "--tool-parser", "--reasoning-parser"),
    *("--attn", "--memory-ratio", "--max-running-requests", "--tp"),
)
"""The flags that `--help` lists."""

EPILOG = """
Sampling flags are the defaults for requests. SIGTERM or Ctrl-C lets running
requests finish, for --drain-timeout seconds; a second one ends at once.

exit codes:
    0  ended by a signal            5  cannot run here
    2  usage, or a port in use      6  a model or file cannot be read
    3  a broken plugin             70  the engine died
    4  a plugin for another SPI
"""


def main(arguments: list[str], engine_module: str | None = None) -> int:
    """Run `headstock serve ARGUMENTS` and return the exit code.

    `engine_module` is what the engine process runs instead of an engine.
    raises: HeadstockError
    """
    command = read_command(arguments)
    options, resolved, settings = command.options, command.resolved, command.settings
    for line in resolved.notes:
        print_note(f"note: {line}")
    start_logs(resolved, quiet=options.quiet)
    show_library_logs()
    if resolved.engine.is_other_rank(os.environ):
        from headstock.requests import start_engine

        # Rank 0 alone serves; this process computes its part of the model until rank 0 ends.
        start_engine(resolved.engine)
    # Imported late: `--help` and completion do not need it.
    from headstock_openai_server.engine.process_start import PROCESS_MODULE
    from headstock_openai_server.engine.service import Service
    from headstock_openai_server.observe.access_log import AccessLog
    from headstock_openai_server.observe.tracing import RequestTracer
    from headstock_openai_server.server import ServerProcess, describe_address, listen

    access_log = AccessLog(settings.access_log)
    tracer = (
        RequestTracer(settings.otlp_endpoint, settings.model_names[0])
        if settings.otlp_endpoint
        else None
    )
    listener = listen(settings)
    address = describe_address(settings, listener)
    # Only the address: the engine may still refuse its options.
    print_note(f"loading {resolved.engine.model}; {address}/health says how far it is")
    if settings.is_open:
        print_note(
            f"warning: {settings.host} may be reached from other machines, and no --api-key is "
            "set: everyone who reaches it may use the model"
        )
    is_quiet = options.quiet and resolved.origins["log_level"] != "flag --log-level"

    async def serve() -> None:
        service = Service(resolved.engine, settings, resolved.sampling)
        server = ServerProcess(
            service,
            access_log,
            listener,
            tracer=tracer,
            engine_module=engine_module or PROCESS_MODULE,
            log_levels=(resolved.engine.log_level, "WARNING" if is_quiet else "NOTSET"),
        )
        code = 0
        try:
            with ProgressBars(shown=not options.quiet) as bars:

                def show_ready(session: EngineSession) -> None:
                    bars.__exit__(None, None, None)
                    if not options.quiet:
                        print_summary(session.list_summary(verbose=options.verbose))
                    names = ", ".join(settings.model_names)
                    print_note(f"ready: {names}, listening on {address}/v1")

                await server.run(bars.update, show_ready)
        except HeadstockError as error:
            code = error.exit_code
            if not service.num_overdue:
                raise
            print_note(f"headstock: {error}")
        finally:
            if service.num_overdue:
                # Python would wait for threads in chat templates that do not terminate.
                access_log.close()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    try:
        asyncio.run(serve())
    finally:
        access_log.close()
        listener.close()
        if settings.uds:
            with contextlib.suppress(OSError):
                os.unlink(settings.uds)
        if tracer is not None:
            tracer.close()
    return 0


@frozen
class ServeCommand:
    """What the arguments of `headstock serve` and the environment say.

    options: as parsed, those of the engine and of the server too
    """

    options: argparse.Namespace
    resolved: ResolvedConfig
    settings: ServerSettings


def read_command(arguments: list[str]) -> ServeCommand:
    """Read the arguments of `headstock serve`.   raises: UsageError, ModelError"""
    options = make_parser().parse_args(arguments)
    resolved = resolve_flags(options, os.environ)
    settings = read_settings(options, os.environ, resolved.engine.model)
    try:
        check_defaults(resolved.sampling)
    except RequestError as error:
        raise UsageError(str(error)) from error
    return ServeCommand(options, resolved, settings)


def make_parser() -> FlagParser:
    """The parser of `headstock serve`."""
    root = FlagParser(
        prog="headstock serve",
        usage="%(prog)s [MODEL] [options]",
        hint=" (the one word without a flag is the model)",
        max_words=1,
        common=COMMON_FLAGS,
        description="Serve a model over HTTP, as OpenAI's API does. MODEL is an installed "
        "checkpoint's name, a directory, or a hub id.",
        epilog=EPILOG,
    )
    add_server_flags(root)
    root.add_argument(
        "-v", "--verbose", action="store_true", help="show plugins, memory and times at the start"
    )
    root.add_argument("--quiet", action="store_true", help="no summary, no log line below WARNING")
    add_sampling_flags(root)
    add_engine_flags(root, server=True)
    return root
