"""Time prompts that arrive while rows decode, with and without a graph of their step."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median

from attrs import define, evolve, field, frozen

from headstock import LLM, EngineConfig, SamplingParams
from headstock.llm import get_session
from headstock.startup import tuned_choices
from headstock_bench.workloads import SEED, Prompts

MARGIN = 0.03
"""The speed-up without a graph that makes a size lose its graph."""
ROWS = 8
"""Number of rows that decode while prompts arrive."""
CONTEXT = 512
"""Prompt tokens of these rows."""
ROW_TOKENS = 512
"""Maximum tokens that a row generates while prompts of one size arrive."""
RUNS = 9
"""Prompts of each size; the figure is the median."""
SETTLED_TOKENS = 4
"""Tokens of each row between two arrivals."""
POLL_SECONDS = 0.001
MANY_TOKENS = 1024
"""From here on each size is measured, below it only powers of two.

There, the device time is close to the launch time, so a graph may not pay off.
"""


OpenLLM = Callable[[EngineConfig], LLM]
"""Starts engines; may show progress."""


def open_llm(config: EngineConfig) -> LLM:
    """Start an engine with this configuration."""
    return LLM(config=config)


@frozen(kw_only=True)
class Arrival:
    """The result of one prompt: its times, and the number of steps without a graph meanwhile."""

    times: tuned_choices.ArrivalTimes
    num_launched: int


@frozen(kw_only=True)
class StepSize:
    """A size, and the tokens of the step that measures it."""

    size: int
    tokens: int


def measure_buckets(
    config: EngineConfig, free_memory: Callable[[], None], open_llm: OpenLLM = open_llm
) -> tuple[tuned_choices.TunedBucket, ...]:
    """Measure steps with prompts in two engines, with graphs and without; smallest first.

    free_memory: called after each engine has ended
    raises: CannotRun, UsageError, ModelError, EngineDied
    """
    # So that each prompt is one step with one token of each row.
    config = evolve(config, max_itl_ms=None, proposer="off", scheduler="mixed", on_pressure="queue")
    with open_llm(config) as llm:
        summary = get_session(llm).engine.summary
        rows = count_rows(config, summary.max_running_requests)
        sizes = choose_sizes(summary.prompt_graphs, config.max_batch_tokens)
        replayed = {each.size: time_size(llm, each, rows, replays=True) for each in sizes}
    free_memory()
    launched: dict[int, tuned_choices.ArrivalTimes | str] = {}
    timed = [each for each in sizes if isinstance(replayed[each.size], tuned_choices.ArrivalTimes)]
    if timed:
        with open_llm(evolve(config, cuda_graph_max_tokens=0)) as llm:
            launched = {each.size: time_size(llm, each, rows, replays=False) for each in timed}
        free_memory()
    return tuple(
        make_bucket(each.size, replayed[each.size], launched.get(each.size)) for each in sizes
    )


def count_rows(config: EngineConfig, most: int) -> int:
    """Number of rows that decode with a prompt in a graph; `most` rows run at once."""
    graph_rows = most if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
    return min(ROWS, min(most, graph_rows) - 1)


def make_bucket(
    size: int,
    replayed: tuned_choices.ArrivalTimes | str,
    launched: tuned_choices.ArrivalTimes | str | None,
) -> tuned_choices.TunedBucket:
    """A size with its times, or with the reason why there are none."""
    if isinstance(replayed, tuned_choices.ArrivalTimes) and isinstance(
        launched, tuned_choices.ArrivalTimes
    ):
        return tuned_choices.TunedBucket(tokens=size, replayed=replayed, launched=launched)
    refusal = next(str(each) for each in (replayed, launched) if isinstance(each, str))
    return tuned_choices.TunedBucket(tokens=size, refusal=refusal)


def choose_sizes(sizes: Sequence[int], most: int) -> list[StepSize]:
    """The measured sizes of a runner, smallest first.

    A step is halfway between its size and the one below, like the average arrival. The largest
    size is measured by a full step of `most` tokens, its purpose.
    """
    ordered = sorted(sizes)
    return [
        StepSize(size=size, tokens=most if size >= most else (below + 1 + size) // 2)
        for below, size in zip((0, *ordered), ordered, strict=False)
        if size >= MANY_TOKENS or size & (size - 1) == 0
    ]


def choose_graph_tokens(buckets: Sequence[tuned_choices.TunedBucket]) -> int | None:
    """The largest size that keeps its graph; 0 for none, None if all measured sizes do.

    Graphs are the default. Sizes above a limit lose them if their steps are faster without graphs
    by the margin, in the geometric mean. Of several such limits, the one that gains most is chosen.
    """
    measured = [each for each in buckets if not each.refusal]
    logs = [math.log(compare_bucket(each)) for each in measured]
    won = {at: sum(logs[at:]) for at in range(len(logs))}
    least = -math.log(1 - MARGIN)
    cuts = [at for at in won if won[at] / (len(logs) - at) > least]
    if not cuts:
        return None
    at = max(cuts, key=won.__getitem__)
    return measured[at - 1].tokens if at else 0


def compare_bucket(bucket: tuned_choices.TunedBucket) -> float:
    """The times with a graph over those without: the geometric mean of first token and gap."""
    one, two = bucket.replayed, bucket.launched
    assert one is not None and two is not None, "a size with a refusal is not compared"
    return math.sqrt(one.first_token / two.first_token * one.gap / two.gap)


def time_size(
    llm: LLM, step: StepSize, rows: int, *, replays: bool
) -> tuned_choices.ArrivalTimes | str:
    """The times of a prompt whose step has this size with these rows, or the reason for none.

    replays: whether the step should use its graph
    raises: EngineDied
    """
    engine = get_session(llm).engine
    longest, pool = engine.max_seq_len, engine.summary.kv_tokens
    length = max(step.tokens - rows, 1)
    context = min(CONTEXT, longest // 4)
    row_tokens = min(ROW_TOKENS, longest - context)
    if rows < 1:
        return "no row can decode with a prompt in one graph"
    if length + 2 > longest:
        return f"this prompt is longer than a sequence of at most {longest} tokens"
    if rows * (context + row_tokens) + length + 2 > pool:
        return f"the KV pool holds {pool} tokens, which is too few"
    arrivals = asyncio.run(
        time_arrivals(
            llm, length, rows, Prompts(engine.model.vocab, step.size), context, row_tokens
        )
    )
    if not arrivals:
        return "requests failed, or ended too soon"
    if replays and any(each.num_launched for each in arrivals):
        return "no graph serves this step"
    return tuned_choices.ArrivalTimes(
        first_token=median(each.times.first_token for each in arrivals),
        gap=median(each.times.gap for each in arrivals),
    )


async def time_arrivals(
    llm: LLM, length: int, rows: int, prompts: Prompts, context: int, row_tokens: int
) -> list[Arrival]:
    """The results of prompts of `length` tokens, one after another, while rows decode.

    raises: EngineDied
    """
    decoding = [DecodingRow() for _ in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=row_tokens, ignore_eos=True)
    tasks = [
        asyncio.create_task(row.follow(llm, prompts.draw(context), params)) for row in decoding
    ]
    rng = Random(SEED)
    try:
        arrivals = [
            await time_arrival(llm, prompts.draw(length), decoding, rng) for _ in range(RUNS + 1)
        ]
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    # The first prompt of a size may trigger compilation.
    return [each for each in arrivals[1:] if each is not None]


async def time_arrival(
    llm: LLM, prompt: list[int], decoding: Sequence[DecodingRow], rng: Random
) -> Arrival | None:
    """A prompt's time to its first token, and the longest gap of the rows meanwhile.

    None where a row has ended, or the prompt failed.   raises: EngineDied
    """
    engine = get_session(llm).engine
    await wait_for_tokens(decoding, SETTLED_TOKENS)
    if any(row.is_over for row in decoding):
        return None
    # Rows get their tokens right after a step's launch, but callers submit at any time.
    await asyncio.sleep(rng.random() * decoding[0].find_longest_gap(decoding[0].times[-2]))
    before = engine.stats()
    arrival, first = time.perf_counter(), None
    # The last token of an answer is reported later than others, together with its end.
    two = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    async for output in llm.astream(prompt, two):
        if first is None and output.outputs[0].token_ids:
            first = time.perf_counter()
    # This step's tokens and the next ones, since the next step may begin late.
    await wait_for_tokens(decoding, 2)
    if first is None or any(row.is_over for row in decoding):
        return None
    after = engine.stats()
    executed = after.executed_steps - before.executed_steps
    return Arrival(
        times=tuned_choices.ArrivalTimes(
            first_token=1e3 * (first - arrival),
            gap=1e3 * max(row.find_longest_gap(arrival) for row in decoding),
        ),
        num_launched=executed - (after.replayed_steps - before.replayed_steps),
    )


async def wait_for_tokens(decoding: Sequence[DecodingRow], count: int) -> None:
    """Return when each row has `count` more tokens or has ended."""
    wanted = [(row, len(row.times) + count) for row in decoding]
    while any(len(row.times) < most and not row.is_over for row, most in wanted):
        await asyncio.sleep(POLL_SECONDS)


@define(eq=False)
class DecodingRow:
    """A decoding row and the times of its tokens, in seconds of `time.perf_counter`."""

    times: list[float] = field(factory=list)
    is_over: bool = False

    async def follow(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        """Send the request, and record each token until it ends or is cancelled.

        raises: EngineDied
        """
        try:
            async for output in llm.astream(prompt, params):
                if output.outputs[0].token_ids:
                    self.times.append(time.perf_counter())
        finally:
            self.is_over = True

    def find_longest_gap(self, begin: float) -> float:
        """The longest time between two tokens, counting only gaps that end after `begin`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(later - earlier for earlier, later in pairs if later > begin)
