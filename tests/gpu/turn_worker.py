"""The process of an engine that runs workloads in turns with others; see `gpu.turns`.

    python turn_worker.py headstock|vllm JSON

Of this project it imports what headstock needs, and nothing for vLLM, whose process may lack it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TextIO

import numpy as np

WARM_UP = 16
"""Requests of a warm-up of streams; those that come all at once warm up with all."""
SETTLE_SECONDS = 30
Times = tuple[float, list[float]]
"""When a request was due, and when its pieces came, in seconds of `time.perf_counter`."""


def main() -> None:
    """Answer each line of standard input."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    # What libraries print goes to standard error; answers have a file of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    {"headstock": serve_headstock, "vllm": serve_vllm}[kind](settings, answers)


def read_works() -> Iterator[tuple[dict[str, Any], bool]]:
    """The work of each line of standard input, cut to its first requests where it warms up."""
    for line in sys.stdin:
        asked = json.loads(line)
        with open(asked["work"], encoding="utf-8") as file:
            work = json.load(file)
        if asked["warm_up"] and work["is_streamed"]:
            for name in ("prompts", "outputs", "arrivals"):
                work[name] = work[name] and work[name][: work["rows"] + WARM_UP]
        yield work, asked["warm_up"]
        if asked["warm_up"]:
            # As servers do, of this engine and of vLLM: what lives by now is not looked at again.
            gc.collect()
            gc.freeze()


def write_answer(answers: TextIO, **found: Any) -> None:
    """Write one line."""
    answers.write(json.dumps(found) + "\n")


def describe_run(
    work: dict[str, Any], seconds: float, streams: list[Times] | None
) -> dict[str, Any]:
    """Seconds, throughput and, of streams, percentiles in milliseconds."""
    found = {
        "seconds": round(seconds, 4),
        "in_tok_s": round(sum(map(len, work["prompts"])) / seconds, 1),
        "out_tok_s": round(sum(work["outputs"]) / seconds, 1),
    }
    if streams is None:
        return found
    rows, others = streams[: work["rows"]], streams[work["rows"] :]
    firsts = [times[0] - due for due, times in others]
    gaps = np.concatenate([np.diff(times) for _, times in rows or others])
    if rows:
        begin, end = others[0][0], max(times[-1] for _, times in others)
        ends = np.concatenate([times[1:] for _, times in rows])
        gaps = gaps[(ends >= begin) & (ends <= end)]
        found["rows_ended_early"] = any(times[-1] < end for _, times in rows)
    for name, values in (("ttft", firsts), ("itl", gaps)):
        for percent in (50, 99):
            value = round(1e3 * float(np.percentile(values, percent)), 3) if len(values) else None
            found[f"{name}_p{percent}_ms"] = value
    return found


async def follow_streams(
    work: dict[str, Any], follow: Callable[[int, float], Coroutine[Any, Any, Times]]
) -> tuple[list[Times], float]:
    """Send each request when it is due, or where nothing is when the one before is over.

    follow: sends the request of a number, due at a time; the times of its tokens
    """
    begin, count = time.perf_counter(), len(work["prompts"])
    if work["arrivals"] is None:
        streams = [await follow(number, time.perf_counter()) for number in range(count)]
        return streams, time.perf_counter() - begin
    loop, due = asyncio.get_running_loop(), asyncio.Queue[float]()

    def keep_time() -> None:
        # A thread: asyncio.sleep rounds up to whole milliseconds.
        for at in work["arrivals"]:
            time.sleep(max(0.0, begin + at - time.perf_counter()))
            loop.call_soon_threadsafe(due.put_nowait, begin + at)

    threading.Thread(target=keep_time, daemon=True).start()
    tasks = [asyncio.create_task(follow(number, await due.get())) for number in range(count)]
    return await asyncio.gather(*tasks), time.perf_counter() - begin


def serve_headstock(settings: dict[str, Any], answers: TextIO) -> None:
    """Run work on headstock."""
    import headstock
    from headstock import LLM, SamplingParams
    from headstock.llm import get_session
    from headstock_bench.conditions import read_conditions

    with LLM(**settings) as llm:
        engine: Any = get_session(llm).engine
        about = read_conditions(llm, version=headstock.__version__, shape="", weights="dummy")
        write_answer(
            answers,
            version=about.version,
            commit=about.commit,
            attn=about.attn,
            kv_tokens=engine.summary.kv_tokens,
        )

        for work, is_warm_up in read_works():
            params = [
                SamplingParams(
                    temperature=work["temperature"],
                    seed=work["seed"] + number,
                    max_tokens=count,
                    ignore_eos=True,
                )
                for number, count in enumerate(work["outputs"])
            ]

            async def follow(
                number: int, due: float, work: dict[str, Any] = work, params: Any = params
            ) -> Times:
                stream = llm.astream(work["prompts"][number], params[number])
                return due, [
                    time.perf_counter() async for output in stream if output.outputs[0].token_ids
                ]

            while engine.has_work:
                time.sleep(0.001)
            llm.reset_prefix_cache()
            before, streams = engine.stats(), None
            if work["is_streamed"]:
                streams, seconds = asyncio.run(follow_streams(work, follow))
            else:
                begin = time.perf_counter()
                llm.generate(work["prompts"], params, use_tqdm=False)
                seconds = time.perf_counter() - begin
            after = engine.stats()
            if is_warm_up:
                settle(engine)  # graphs are captured while an engine is idle: not in another's turn
            counts = {
                name: getattr(after, name) - getattr(before, name)
                for name in ("executed_steps", "replayed_steps")
            }
            write_answer(answers, **describe_run(work, seconds, streams), **counts)


def settle(engine: Any) -> None:
    """Return when no graph is left to be captured."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        if engine.late_captures is None or engine.late_captures.is_done:
            return
        time.sleep(0.05)


def serve_vllm(settings: dict[str, Any], answers: TextIO) -> None:
    """Run work on vLLM, by its engine for streams or by that for whole answers."""
    arguments = {
        "model": settings["model"],
        "load_format": "dummy",
        "max_model_len": settings["max_seq_len"],
        "gpu_memory_utilization": settings["memory"],
        "dtype": "bfloat16",
        "enable_prefix_caching": True,
        "max_num_seqs": 256,
        "disable_log_stats": True,
        **settings.get("arguments", {}),
    }
    if settings["is_streamed"]:
        asyncio.run(_stream_vllm(arguments, answers))
        return
    import vllm

    llm = vllm.LLM(**arguments)
    write_answer(answers, version=vllm.__version__)
    for work, _ in read_works():
        params = [
            vllm.SamplingParams(
                temperature=work["temperature"],
                ignore_eos=True,
                max_tokens=count,
                detokenize=False,
            )
            for count in work["outputs"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        write_answer(answers, **describe_run(work, time.perf_counter() - begin, None))


async def _stream_vllm(arguments: dict[str, Any], answers: TextIO) -> None:
    import vllm
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    ids = iter(range(10**9))
    write_answer(answers, version=vllm.__version__)
    works = read_works()
    while (asked := await asyncio.to_thread(next, works, None)) is not None:
        work, _ = asked

        async def follow(number: int, due: float, work: dict[str, Any] = work) -> Times:
            prompt, count = work["prompts"][number], work["outputs"][number]
            params = SamplingParams(
                temperature=work["temperature"],
                ignore_eos=True,
                max_tokens=count,
                detokenize=False,
            )
            times: list[float] = []
            seen = 0
            request = {"prompt_token_ids": prompt}
            async for output in engine.generate(request, params, request_id=str(next(ids))):
                if len(output.outputs[0].token_ids) > seen:
                    times.append(time.perf_counter())
                    seen = len(output.outputs[0].token_ids)
            if seen != count:
                raise RuntimeError(f"{seen} of {count} tokens came")
            return due, times

        await engine.reset_prefix_cache()
        streams, seconds = await follow_streams(work, follow)
        write_answer(answers, **describe_run(work, seconds, streams))
    engine.shutdown()


if __name__ == "__main__":
    main()
