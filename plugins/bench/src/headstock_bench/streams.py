"""Send requests when they are due and follow their streams, like a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from headstock import LLM, SamplingParams
from headstock.llm import get_session
from headstock_bench.latency import StreamTimes
from headstock_bench.latency_workloads import LatencyWorkload

IDLE_POLL_SECONDS = 0.001


def stream_requests(
    llm: LLM, workload: LatencyWorkload, params: Sequence[SamplingParams]
) -> tuple[list[StreamTimes], float]:
    """The observations of each request's caller, in order, and the total wall seconds.

    raises: EngineDied
    """
    return asyncio.run(_stream_requests(llm, workload, params))


async def _stream_requests(
    llm: LLM, workload: LatencyWorkload, params: Sequence[SamplingParams]
) -> tuple[list[StreamTimes], float]:
    await _wait_until_idle(llm)
    start = time.perf_counter()
    pairs = list(zip(workload.prompts, params, strict=True))
    if workload.arrivals is None:
        # One by one, so that no first token waits for another request.
        streams = []
        for prompt, one in pairs:
            await _wait_until_idle(llm)
            streams.append(await _follow_stream(llm, prompt, one, time.perf_counter()))
        return streams, time.perf_counter() - start
    due: asyncio.Queue[float] = asyncio.Queue()
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            with release_when_due([start + at for at in workload.arrivals], due):
                for prompt, one in pairs:
                    # From the moment when the request was due: an engine that keeps its callers
                    # from sending gains nothing by it.
                    follow = _follow_stream(llm, prompt, one, await due.get())
                    tasks.append(group.create_task(follow))
    except ExceptionGroup as errors:
        # A dead engine ends all streams with the same error: raise the first.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks], time.perf_counter() - start


@contextlib.contextmanager
def release_when_due(moments: Sequence[float], due: asyncio.Queue[float]) -> Iterator[None]:
    """Put each moment, in seconds of `time.perf_counter`, into `due` when it is reached."""
    # A thread, because asyncio.sleep rounds up to whole milliseconds, which would add to each
    # time to first token.
    loop = asyncio.get_running_loop()
    closing = threading.Event()

    def keep_time() -> None:
        for moment in moments:
            if closing.wait(max(0.0, moment - time.perf_counter())):
                return
            loop.call_soon_threadsafe(due.put_nowait, moment)

    thread = threading.Thread(target=keep_time, name="headstock-bench-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


async def _wait_until_idle(llm: LLM) -> None:
    """Return when the engine has no work.   raises: EngineDied"""
    session = get_session(llm)
    while session.engine.has_work:
        # An engine that died with work left would never be idle.
        session.loop.check_alive()
        await asyncio.sleep(IDLE_POLL_SECONDS)


async def _follow_stream(
    llm: LLM, prompt: tuple[int, ...], params: SamplingParams, arrival: float
) -> StreamTimes:
    """Send one request, and record what its caller observes.   raises: EngineDied"""
    times: list[float] = []
    token_ids: list[int] = []
    metrics = error = None
    async for output in llm.astream(list(prompt), params):
        now = time.perf_counter()
        (piece,) = output.outputs
        if piece.token_ids:
            times.append(now)
            token_ids += piece.token_ids
        metrics, error = output.metrics, piece.error
    return StreamTimes(
        arrival=arrival,
        times=tuple(times),
        token_ids=tuple(token_ids),
        metrics=metrics,
        error=error,
    )
