"""Starts an engine process, for a server or for `LLM(start=start_engine_process)`."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading

from headstock import EngineConfig, EngineDied
from headstock.requests import EngineLoop, StartedEngine
from headstock_openai_server.engine.messages import Ready
from headstock_openai_server.engine.remote_engine import OnProgress, RemoteEngine, RemoteLoop

PROCESS_MODULE = "headstock_openai_server.engine.process_main"
STANDARD_ERROR = 2


async def connect_engine(on_progress: OnProgress, module: str = PROCESS_MODULE) -> RemoteLoop:
    """A loop for a new engine process, which runs `module` and waits for `RemoteLoop.start`.

    raises: EngineDied if the system cannot start a process
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # A new interpreter, not a fork: the threads and the event loop of this one stay here.
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,  # standard output is the server's
            )
        except OSError as error:
            ours.close()
            raise EngineDied(f"cannot start a process: {error.strerror}") from error
    event_loop = asyncio.get_running_loop()
    _, loop = await event_loop.create_unix_connection(
        lambda: RemoteLoop(process, on_progress), sock=ours
    )
    return loop


def start_engine_process(config: EngineConfig) -> tuple[StartedEngine, EngineLoop]:
    """Start an engine in another process: `LLM(start=start_engine_process)`.

    The connection has its own thread, on which sinks are called.
    raises: like `headstock.requests.start_engine`
    """
    event_loop = asyncio.new_event_loop()

    def run_loop() -> None:
        try:
            event_loop.run_forever()
        finally:
            event_loop.close()

    async def connect() -> RemoteLoop:
        loop = await connect_engine(lambda stage, completed, total: None)
        loop.start(config, config.log_level, "NOTSET")
        return loop

    async def wait_ready(loop: RemoteLoop) -> Ready:
        ready = await loop.ready
        # Not earlier: a stopping event loop would not deliver why the engine did not start.
        loop.ended.add_done_callback(lambda _: event_loop.stop())
        return ready

    threading.Thread(target=run_loop, name="headstock-remote", daemon=True).start()
    try:
        loop = asyncio.run_coroutine_threadsafe(connect(), event_loop).result()
    except BaseException:
        event_loop.call_soon_threadsafe(event_loop.stop)
        raise
    try:
        ready = asyncio.run_coroutine_threadsafe(wait_ready(loop), event_loop).result()
    except BaseException:  # it did not start, or Ctrl-C
        loop.process.kill()
        loop.close()
        event_loop.call_soon_threadsafe(event_loop.stop)
        raise
    return RemoteEngine(ready, loop), loop
