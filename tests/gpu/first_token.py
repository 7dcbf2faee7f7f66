"""Where the time to an idle engine's first token goes, part by part.

    PYTHONPATH=tests:tests/support python -m gpu.first_token [--shape qwen3-0.6b] [--attn fa]
        [--lengths 128,512,2048] [--count 40]

Prints a JSON object: for each length of a prompt the median milliseconds from the call of
`LLM.astream` until each point, in the order in which a request passes them.
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

from headstock import LLM, SamplingParams
from headstock.llm import get_session
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.workloads import draw_tokens

POINTS = (
    "the engine has the request",
    "its thread plans",
    "the step is planned",
    "the launch begins",
    "all is launched",
    "the device has computed it",
    "its token is an update",
    "the caller has it",
)
PAUSE = 0.02
"""Seconds without work before a request."""
WARM_UP = 8


class Points:
    """When a request passed each point first, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def note(self, point: str) -> None:
        """Note a point, unless it was passed before."""
        self.times.setdefault(point, time.perf_counter())

    def note_call(self, call: Callable[..., Any], before: str = "", after: str = "") -> Any:
        """The call, which notes a point before it and another behind it."""

        def noted(*arguments: Any, **named: Any) -> Any:
            if before:
                self.note(before)
            result = call(*arguments, **named)
            if after:
                self.note(after)
            return result

        return noted


class Watched:
    """Another object, but for some calls."""

    def __init__(self, inner: Any, **calls: Callable[..., Any]) -> None:
        self.inner = inner
        self.__dict__.update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def watch(engine: Any) -> Points:
    """Have the engine note the points of a request.   writes: parts of the engine"""
    points = Points()
    begin, collect = engine.planning.begin, engine.output_tracker.collect

    def plan(*arguments: Any) -> Any:
        # An idle engine may plan before the request has come.
        if POINTS[0] in points.times:
            points.note(POINTS[1])
        return begin(*arguments)

    def make_updates(*arguments: Any) -> Any:
        updates = collect(*arguments)
        if any(update.tokens for update in updates):
            points.note(POINTS[6])
        return updates

    finish = points.note_call(engine.planning.finish, after=POINTS[2])
    engine.enqueue = points.note_call(engine.enqueue, after=POINTS[0])
    engine.planning = Watched(engine.planning, begin=plan, finish=finish)
    engine.executor = Watched(
        engine.executor, execute=points.note_call(engine.executor.execute, POINTS[3], POINTS[4])
    )
    engine._collect_step = points.note_call(engine._collect_step, after=POINTS[5])
    engine.output_tracker = Watched(engine.output_tracker, collect=make_updates)
    return points


async def time_request(llm: LLM, points: Points, prompt: Sequence[int]) -> dict[str, float]:
    """Milliseconds from the call until each point."""
    engine = get_session(llm).engine
    while engine.has_work:
        await asyncio.sleep(0.001)
    llm.reset_prefix_cache()
    await asyncio.sleep(PAUSE)
    points.times = {}
    begin = time.perf_counter()
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=2, ignore_eos=True)
    async for output in llm.astream(list(prompt), params):
        if output.outputs[0].token_ids:
            points.note(POINTS[7])
    return {point: 1e3 * (points.times[point] - begin) for point in POINTS}


def measure(llm: LLM, length: int, count: int) -> dict[str, float]:
    """The median of each point over `count` prompts of this length, none of which begin alike."""
    engine: Any = get_session(llm).engine
    while not (engine.late_captures is None or engine.late_captures.is_done):
        time.sleep(0.05)
    points, rng, vocab = watch(engine), Random(length), engine.model.vocab

    async def run() -> list[dict[str, float]]:
        prompts = [
            [token % vocab for token in draw_tokens(rng, length)] for _ in range(WARM_UP + count)
        ]
        return [await time_request(llm, points, prompt) for prompt in prompts][WARM_UP:]

    found = asyncio.run(run())
    return {point: round(median(each[point] for each in found), 3) for point in POINTS}


def main(builds: list[subprocess.Popen[bytes]], words: Sequence[str] = ()) -> dict[str, Any]:
    """The findings by length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=MODEL_SHAPES)
    parser.add_argument("--attn", default="fa")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="128,512,2048")
    parser.add_argument("--count", type=int, default=40)
    asked = parser.parse_args(words)
    found: dict[str, Any] = {"ok": True, "shape": asked.shape, "attn": asked.attn}
    with tempfile.TemporaryDirectory() as folder:
        write_model_directory(MODEL_SHAPES[asked.shape], Path(folder))
        for length in map(int, asked.lengths.split(",")):
            settings = {"device": asked.device, "attn": asked.attn, "max_seq_len": 2 * length + 64}
            with LLM(folder, load_format="dummy", num_pages=512, **settings) as llm:
                found[str(length)] = measure(llm, length, asked.count)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main([], sys.argv[1:]), indent=1) + "\n")
