"""What the host takes of a step of many streams: the engine's thread, its callers' and the wait.

    PYTHONPATH=tests:tests/support python -m gpu.stream_host [--shape qwen3-0.6b] [--attn fa]
        [--streams 32,128,256] [--intervals 5,0.5] [--turns 3]
    PYTHONPATH=tests:tests/support python -m gpu.stream_host --shape demo --attn sdpa --device cpu
        --sleep 1

Streams begin at once, each a task of one event loop in the engine's process. Prints a JSON object:
for each number of streams and each interval, in milliseconds, after which a thread gives up the
interpreter, medians of microseconds a step. A step is one in which all streams decode: they are
counted from the last first token to the first end.

`--sleep` takes a device that computes nothing and is done with each step after so many
milliseconds, so that a CPU shows what the host takes. Prompts have 32 tokens there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from gpu.first_token import Watched

from headstock import LLM, SamplingParams
from headstock.llm import get_session
from headstock.spi import Sample, Step
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.workloads import draw_tokens

PROMPT, ANSWER = 512, 128
"""Tokens in and out of a stream."""
TOKEN = 65
"""What a device that sleeps samples."""
SLEEP_PROMPT = 32
"""Tokens in where the device sleeps."""
Reading = dict[str, float]
"""Seconds of each clock, and the steps so far."""


class IdleRunner:
    """A runner that replays nothing and samples the same token for every row."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, step: Step) -> Sample:
        """A sample of the step's scored tokens."""
        count = len(step.scored_tokens)
        return Sample(
            tokens=torch.full((count,), TOKEN), healthy=torch.ones(count, dtype=torch.bool)
        )


def let_device_sleep(engine: Any, seconds: float) -> None:
    """Have each step end so long after the one before and compute nothing.   writes: engine"""
    executor = engine.executor
    while not hasattr(executor, "runner"):
        executor = executor.inner
    executor.runner = IdleRunner(executor.runner)
    execute, free_at = engine.executor.execute, 0.0

    def launch(*arguments: Any) -> Any:
        nonlocal free_at
        pending = execute(*arguments)
        free_at = max(free_at, time.perf_counter()) + seconds
        end = free_at

        def wait() -> Any:
            time.sleep(max(0.0, end - time.perf_counter()))
            return pending.wait()

        return Watched(pending, wait=wait)

    engine.executor = Watched(engine.executor, execute=launch)


class HostClocks:
    """The processor time of the engine's thread and of another one, and the waits for the device.

    The engine's waits are told apart, because a wait for an event may keep its processor busy. The
    sleep before a late plan is one of them.
    """

    def __init__(self, engine: Any, thread: Any) -> None:
        self.engine = engine
        self.engine_clock = time.pthread_getcpuclockid(thread.ident)
        self.waited = self.waited_busy = 0.0
        engine.executor = Watched(engine.executor, execute=self.time_steps(engine.executor))
        engine.late_planner.sleep = self.time_wait(engine.late_planner.sleep)

    def time_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`wait`, whose time counts as waited."""

        def timed(*arguments: Any) -> Any:
            begin, busy = time.perf_counter(), time.thread_time()
            result = wait(*arguments)
            self.waited += time.perf_counter() - begin
            self.waited_busy += time.thread_time() - busy
            return result

        return timed

    def time_steps(self, executor: Any) -> Callable[..., Any]:
        """The executor's `execute`, the wait for whose samples counts as waited."""

        def execute(*arguments: Any) -> Any:
            pending = executor.execute(*arguments)
            return Watched(pending, wait=self.time_wait(pending.wait))

        return execute

    def read(self) -> Reading:
        """The present time of each clock; called by the thread of the callers."""
        busy = time.clock_gettime(self.engine_clock) - self.waited_busy
        return {
            "wall": time.perf_counter(),
            "engine": busy,
            "callers": time.thread_time(),
            "waited": self.waited,
            "steps": self.engine.stats().executed_steps,
        }


async def run_streams(
    llm: LLM, prompts: Sequence[list[int]], clocks: HostClocks
) -> tuple[Reading, Reading]:
    """The readings at the last first token and at the first end.

    raises: RuntimeError where a stream ends before all have begun
    """
    readings: list[Reading] = []
    waiting = len(prompts)

    async def follow(number: int) -> None:
        nonlocal waiting
        params = SamplingParams(temperature=0.6, seed=number, max_tokens=ANSWER, ignore_eos=True)
        count = 0
        async for output in llm.astream(prompts[number], params):
            tokens = len(output.outputs[0].token_ids)
            if tokens and not count:
                waiting -= 1
                if not waiting:
                    readings.append(clocks.read())
            count += tokens
        if waiting:
            raise RuntimeError(f"a stream ended before {waiting} others had a token")
        if len(readings) == 1:
            readings.append(clocks.read())

    await asyncio.gather(*map(follow, range(len(prompts))))
    return readings[0], readings[1]


def measure(
    llm: LLM, clocks: HostClocks, streams: int, turns: int, length: int
) -> dict[str, float]:
    """Medians of microseconds a step, and of the tokens a second that they make."""
    vocab, found = clocks.engine.model.vocab, []
    for turn in range(turns + 1):
        rng = Random(turn)
        prompts = [[token % vocab for token in draw_tokens(rng, length)] for _ in range(streams)]
        llm.reset_prefix_cache()
        begin, end = asyncio.run(run_streams(llm, prompts, clocks))
        steps = end["steps"] - begin["steps"]
        found.append({name: 1e6 * (end[name] - begin[name]) / steps for name in begin})
        while clocks.engine.has_work:
            time.sleep(0.001)
    kept = found[1:]  # the first one warms up
    medians = {name: round(median(each[name] for each in kept), 1) for name in kept[0]}
    del medians["steps"]
    return medians | {"out_tok_s": round(1e6 * streams / medians["wall"], 1)}


def main(builds: list[subprocess.Popen[bytes]], words: Sequence[str] = ()) -> dict[str, Any]:
    """The findings by streams and interval."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=MODEL_SHAPES)
    parser.add_argument("--attn", default="fa")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", default="32,128,256")
    parser.add_argument("--intervals", default="5,0.5")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--num-pages", type=int, default=4000)
    parser.add_argument("--sleep", type=float, metavar="MS")
    asked = parser.parse_args(words)
    length = PROMPT if asked.sleep is None else SLEEP_PROMPT
    found: dict[str, Any] = {"ok": True, "shape": asked.shape, "attn": asked.attn, "us_a_step": {}}
    interval = sys.getswitchinterval()
    with tempfile.TemporaryDirectory() as folder:
        write_model_directory(MODEL_SHAPES[asked.shape], Path(folder))
        settings = {"device": asked.device, "attn": asked.attn, "num_pages": asked.num_pages}
        settings |= {"overlap": True, "max_seq_len": length + ANSWER + 64}
        with LLM(folder, load_format="dummy", **settings) as llm:
            session: Any = get_session(llm)
            while not (
                session.engine.late_captures is None or session.engine.late_captures.is_done
            ):
                time.sleep(0.05)
            if asked.sleep is not None:
                let_device_sleep(session.engine, asked.sleep / 1e3)
            clocks = HostClocks(session.engine, session.loop.thread)
            for streams in map(int, asked.streams.split(",")):
                for milliseconds in asked.intervals.split(","):
                    sys.setswitchinterval(float(milliseconds) / 1e3)
                    name = f"{streams} streams, {milliseconds} ms"
                    found["us_a_step"][name] = measure(llm, clocks, streams, asked.turns, length)
    sys.setswitchinterval(interval)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main([], sys.argv[1:]), indent=1) + "\n")
