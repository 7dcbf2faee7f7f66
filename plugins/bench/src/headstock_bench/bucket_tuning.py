"""Time prompts that arrive beside rows that decode, with a graph of their step and without."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from statistics import median

from attrs import define, evolve, field

from headstock import LLM, EngineConfig, SamplingParams
from headstock.llm import get_session
from headstock.startup.tuned_choices import ArrivalTimes, TunedBucket
from headstock_bench.workloads import Prompts

MARGIN = 0.03
"""How much faster steps of a graph must be for the size to have one."""
ROWS = 8
"""Rows that decode while prompts arrive."""
CONTEXT = 512
"""Prompt tokens of these rows."""
RUNS = 5
"""Prompts of each size; the figure is the median."""
ROW_TOKENS = 512
"""The most tokens that a row makes while prompts of one size arrive."""
SETTLED_TOKENS = 4
"""Tokens of each row between two arrivals."""
POLL_SECONDS = 0.001
MANY_TOKENS = 1024
"""From here each size is measured, below it the powers of two alone.

There the device needs about as long as the launches of its work, so that a graph may not pay.
"""


def measure_buckets(
    config: EngineConfig, free_memory: Callable[[], None]
) -> tuple[TunedBucket, ...]:
    """Measure steps with prompts with graphs and without, in an engine each; smallest first.

    free_memory: is called when an engine has ended
    raises: CannotRun, UsageError, ModelError, EngineDied
    """
    config = evolve(config, max_itl_ms=None)  # a prompt is one step
    with LLM(config=config) as llm:
        sizes = choose_sizes(get_session(llm).engine.summary.prompt_graphs)
        replayed = time_sizes(llm, sizes, config.max_batch_tokens)
    free_memory()
    with LLM(config=evolve(config, cuda_graph_max_tokens=0)) as llm:
        launched = time_sizes(llm, sizes, config.max_batch_tokens)
    free_memory()
    return tuple(
        TunedBucket(tokens=size, replayed=replayed[size], launched=launched[size])
        for size in sizes
        if size in replayed and size in launched
    )


def choose_sizes(sizes: Sequence[int]) -> list[int]:
    """Those of a runner's sizes that are measured, smallest first."""
    return sorted(size for size in sizes if size >= MANY_TOKENS or size & (size - 1) == 0)


def choose_graph_tokens(buckets: Sequence[TunedBucket]) -> int | None:
    """The largest size with a faster graph; 0 where there is none, None for the largest of all."""
    faster = [each.tokens for each in buckets if compare_bucket(each) < 1 - MARGIN]
    if not buckets or faster[-1:] == [buckets[-1].tokens]:
        return None
    return faster[-1] if faster else 0


def compare_bucket(bucket: TunedBucket) -> float:
    """A graph's times by those without it: the geometric mean of first token and gap."""
    one, two = bucket.replayed, bucket.launched
    return math.sqrt(one.first_token / two.first_token * one.gap / two.gap)


def time_sizes(llm: LLM, sizes: Sequence[int], most: int) -> dict[int, ArrivalTimes]:
    """Step sizes -> times; those that requests or the pool cannot hold are left out.

    most: the tokens of a full step, which may be padded to a larger size
    raises: EngineDied
    """
    engine = get_session(llm).engine
    rows = min(ROWS, engine.summary.max_running_requests - 1)
    longest, pool = engine.max_seq_len, engine.summary.kv_tokens
    if rows < 1 or longest < CONTEXT + ROW_TOKENS:
        return {}
    prompts = Prompts(engine.model.vocab)
    found: dict[int, ArrivalTimes] = {}
    for size in sizes:
        length = min(size, most) - rows
        if 0 < length < longest and rows * (CONTEXT + ROW_TOKENS) + length < pool:
            times = asyncio.run(time_arrivals(llm, length, rows, prompts))
            found |= {size: times} if times else {}
    return found


async def time_arrivals(llm: LLM, length: int, rows: int, prompts: Prompts) -> ArrivalTimes | None:
    """The medians of prompts of so many tokens, one after another, while so many rows decode.

    None where the rows ended too soon.   raises: EngineDied
    """
    decoding = [DecodingRow() for _ in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=ROW_TOKENS, ignore_eos=True)
    tasks = [
        asyncio.create_task(row.follow(llm, prompts.draw(CONTEXT), params)) for row in decoding
    ]
    try:
        # The first of a size may compile.
        arrivals = [
            await time_arrival(llm, prompts.draw(length), decoding) for _ in range(RUNS + 1)
        ]
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    timed = [each for each in arrivals[1:] if each is not None]
    if not timed:
        return None
    return ArrivalTimes(
        first_token=median(each.first_token for each in timed),
        gap=median(each.gap for each in timed),
    )


async def time_arrival(
    llm: LLM, prompt: list[int], decoding: Sequence[DecodingRow]
) -> ArrivalTimes | None:
    """A prompt's time to its first token, and the longest gap of the rows meanwhile.

    None where a row has ended, or the prompt failed.   raises: EngineDied
    """
    await wait_for_tokens(decoding, SETTLED_TOKENS)
    arrival, first = time.perf_counter(), None
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    async for output in llm.astream(prompt, one):
        first = time.perf_counter() if output.outputs[0].token_ids else first
    # The step's own tokens, and those that wait for it: the next step may begin late.
    await wait_for_tokens(decoding, 2)
    if first is None or any(row.is_over for row in decoding):
        return None
    gap = max(row.find_longest_gap(arrival) for row in decoding)
    return ArrivalTimes(first_token=1e3 * (first - arrival), gap=1e3 * gap)


async def wait_for_tokens(decoding: Sequence[DecodingRow], count: int) -> None:
    """Return when each row has so many tokens more, or is over."""
    wanted = [(row, len(row.times) + count) for row in decoding]
    while any(len(row.times) < most and not row.is_over for row, most in wanted):
        await asyncio.sleep(POLL_SECONDS)


@define(eq=False)
class DecodingRow:
    """A row that decodes: when its tokens came, in seconds of `time.perf_counter`."""

    times: list[float] = field(factory=list)
    is_over: bool = False

    async def follow(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        """Send the request, and note each token until it ends or is cancelled.

        raises: EngineDied
        """
        try:
            async for output in llm.astream(prompt, params):
                if output.outputs[0].token_ids:
                    self.times.append(time.perf_counter())
        finally:
            self.is_over = True

    def find_longest_gap(self, begin: float) -> float:
        """The longest time between two tokens, the later of which came after `begin`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(later - earlier for earlier, later in pairs if later > begin)
