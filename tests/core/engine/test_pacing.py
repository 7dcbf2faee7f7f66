"""`--max-itl-ms`: the fit of step times, the bound that follows, and an engine that keeps it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core.faults.conftest import crash_reports, toys
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples, often
from toy_engine import EngineHarness, Toys, request

from headstock.engine.pacing import (
    LEAST_TOKENS,
    StepPacer,
    StepTimes,
    StepWork,
    choose_prompt_tokens,
    list_prompt_tokens,
)
from headstock.engine.step_clock import StepClock
from headstock.record import read_recording, replay_recording, restore_limits
from headstock.scheduler import Paced, Plan, State
from headstock_conformance.scheduler.toy_device import VOCAB

__all__ = ["crash_reports", "toys"]

DECODE = StepWork(decode_context=50_000)


def milliseconds(work: StepWork, noise: float = 0.0) -> float:
    """A device whose steps take 3 ms, 20 us a prompt token and 10 ns a pair of tokens."""
    return (
        3 + 0.02 * work.prompt_tokens + 1e-5 * work.prompt_pairs + 2e-5 * work.decode_context
    ) * (1 + noise)


def prompt_work(tokens: int, context: int = 0, decode_context: int = 50_000) -> StepWork:
    return StepWork(
        prompt_tokens=tokens,
        decode_context=decode_context,
        prompt_pairs=tokens * (context + tokens / 2),
    )


def fitted(rng: np.random.Generator, noise: float = 0.0, most: int = 4096) -> StepTimes:
    times = StepTimes()
    for _ in range(100):
        tokens = int(rng.choice([0, 0, 64, 256, 1024, most]))
        context = int(rng.integers(0, 20_000))
        work = prompt_work(tokens, context, int(rng.integers(0, 100_000)))
        times = times.observe(work, milliseconds(work, noise * rng.standard_normal()))
    return times


@pytest.mark.feature("V1")
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(0, 4096), context=st.integers(0, 20_000))
def test_a_step_is_predicted_from_others(seed: int, tokens: int, context: int) -> None:
    times, work = fitted(np.random.default_rng(seed)), prompt_work(tokens, context)
    assert times.predict(work) == pytest.approx(milliseconds(work), rel=0.03, abs=0.2)


@pytest.mark.feature("V1")
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    bound=st.floats(1, 200),
    context=st.integers(0, 20_000),
)
def test_the_most_tokens_that_fit_are_chosen(seed: int, bound: float, context: int) -> None:
    times = fitted(np.random.default_rng(seed))
    tokens = choose_prompt_tokens(
        times, decode_context=50_000, context=context, bound=bound, most=4096
    )
    sizes = (64, 128, 256, 512, 1024, 2048, 4096)
    times_by_size = {size: milliseconds(prompt_work(size, context)) for size in sizes}
    # The fit is off by a little, and a margin is kept. Where no size fits, hardly longer steps do.
    most_time = 1.05 * max(bound, 1.25 * times_by_size[64])
    least = max((size for size in sizes if times_by_size[size] <= 0.95 * bound - 0.5), default=64)
    most = max((size for size in sizes if times_by_size[size] <= most_time), default=64)
    assert least <= tokens <= most and tokens in sizes


@pytest.mark.feature("V1")
@given(
    sizes=st.sets(st.integers(1, 8192), max_size=30),
    rows=st.integers(0, 512),
    most=st.integers(0, 16_384),
)
def test_prompt_tokens_fill_graphs_and_no_gap_is_too_wide_to_cross(
    sizes: set[int], rows: int, most: int
) -> None:
    found = list_prompt_tokens(tuple(sizes), rows, most)
    assert found == sorted(set(found)) and all(LEAST_TOKENS <= tokens <= most for tokens in found)
    rows = rows if sizes else 0
    steps = [tokens + rows for tokens in found]
    assert {size for size in sizes if LEAST_TOKENS + rows <= size <= most + rows} <= set(steps)
    assert all(after <= 2 * step for step, after in pairwise(steps))
    assert not steps or 2 * steps[-1] > most + rows
    if not sizes:
        assert found == [LEAST_TOKENS << n for n in range(10) if LEAST_TOKENS << n <= most]


@pytest.mark.feature("V1")
def test_steps_between_the_graphs_and_the_whole_budget_are_tried() -> None:
    # As with --max-batch-tokens 16384: graphs up to 4,096 tokens, and one of full steps.
    graphs, times, chosen = (16_384, 4096, 2048, 1024, 512, 256, 128), StepTimes(), []
    for _ in range(9):
        tokens = choose_prompt_tokens(
            times,
            decode_context=0,
            context=0,
            bound=1e4,
            most=16_384,
            decode_rows=40,
            graph_sizes=graphs,
        )
        chosen.append(tokens)
        times = times.observe(prompt_work(tokens), 1.0)
    assert chosen == [64, 88, 216, 472, 984, 2008, 4056, 8152, 16_344]


@pytest.mark.feature("V1")
@pytest.mark.parametrize(("bound", "tokens"), [(5.0, 1024), (9.9, 1024), (10.1, 64), (13.0, 1024)])
def test_a_bound_that_no_step_keeps_does_not_starve_prompts(bound: float, tokens: int) -> None:
    # A host that takes 9.84 ms a step, and 2.5 us a prompt token: 64 tokens take 10.
    times = StepTimes()
    for count in (0, 64, 128, 512, 1024, 4096) * 10:
        work = StepWork(prompt_tokens=count)
        times = times.observe(work, 9.84 + 0.0025 * count)
    chosen = choose_prompt_tokens(times, decode_context=0, context=0, bound=bound, most=4096)
    assert chosen == tokens


def test_long_contexts_leave_less() -> None:
    times = fitted(np.random.default_rng(1))
    chosen = [
        choose_prompt_tokens(times, decode_context=0, context=context, bound=30, most=4096)
        for context in (0, 5_000, 30_000)
    ]
    assert chosen == [1024, 256, 64]


def test_no_more_than_twice_what_was_timed_is_tried() -> None:
    times, chosen = StepTimes(), []
    for _ in range(6):
        tokens = choose_prompt_tokens(times, decode_context=0, context=0, bound=1e4, most=1000)
        chosen.append(tokens)
        times = times.observe(prompt_work(tokens), 1.0)
    assert chosen == [64, 128, 256, 512, 512, 512]


def test_uneven_steps_leave_a_margin() -> None:
    even, uneven = (fitted(np.random.default_rng(2), noise) for noise in (0.0, 0.2))
    assert even.margin() < 0.5 < 2 < uneven.margin()


@given(errors=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=64))
def test_the_margin_is_a_quantile_of_the_errors(errors: list[float]) -> None:
    margin = StepTimes(errors=tuple(errors)).margin()
    assert margin == pytest.approx(max(np.quantile(errors, 0.95), 0.0))


def test_a_stall_does_not_spoil_the_fit() -> None:
    times = fitted(np.random.default_rng(3))
    before = times.predict(DECODE)
    assert times.observe(DECODE, 5_000).predict(DECODE) == before


def test_a_slower_device_is_noticed() -> None:
    times = fitted(np.random.default_rng(4))
    before = times.predict(DECODE)
    for _ in range(100):
        times = times.observe(DECODE, 2 * milliseconds(DECODE))
    assert times.predict(DECODE) == pytest.approx(2 * before, rel=0.1)


def test_no_term_makes_a_step_shorter() -> None:
    times = StepTimes()
    for tokens, time in ((64, 10.0), (128, 9.0), (256, 8.0), (64, 10.0)):
        times = times.observe(prompt_work(tokens), time)
    predicted = [times.predict(prompt_work(tokens)) for tokens in (0, 64, 256, 1024)]
    assert predicted == sorted(predicted) and predicted[0] >= 0


def test_a_term_that_would_make_steps_shorter_is_left_out_and_no_other() -> None:
    times = StepTimes()
    for number in range(200):
        tokens, context = number % 7 * 64, number % 11 * 8_000
        work = StepWork(prompt_tokens=tokens, decode_context=context)
        times = times.observe(work, 10 - 0.005 * tokens + 1e-4 * context)
    one, other = (StepWork(decode_context=context) for context in (10_000, 60_000))
    assert times.predict(other) - times.predict(one) == pytest.approx(5, rel=0.1)
    assert times.predict(prompt_work(448, decode_context=10_000)) >= times.predict(one)


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan_of(prompt_tokens: int) -> Any:
    """What a pacer reads of a plan of one chunk and no decode row, or of one decode row alone."""
    return SimpleNamespace(
        starts=np.array([0]),
        stops=np.array([prompt_tokens or 1]),
        num_decode=int(not prompt_tokens),
        rows=np.array([0]),
    )


def test_overlapped_steps_are_timed_from_the_end_of_the_one_before() -> None:
    clock = Clock()
    step_clock, seen, running = StepClock(clock), [], []
    for now, is_launch in [(1, 1), (1.5, 1), (2, 0), (3, 1), (4.25, 0), (6, 0), (8, 1)]:
        clock.now = now
        step_clock.note_launch() if is_launch else seen.append(step_clock.note_end())
        clock.now += 0.25
        running.append(step_clock.measure_running() if step_clock.launched else None)
    # Launched at 1, 1.5, 3 and 8; ended at 2, 4.25 and 6.
    assert seen == [1.0, 2.25, 1.75]
    assert running == [0.25, 0.25, 0.25, 0.25, 0.25, None, 0.25]


def test_one_of_eight_steps_without_prompts_is_timed() -> None:
    pacer, seen = StepPacer(10.0, 4096), []
    pacer.times = SimpleNamespace(
        observe=lambda work, time: seen.append((work.prompt_tokens, time)) or pacer.times
    )
    for number, tokens in enumerate([5, *[0] * 17, 6, *[0] * 8]):
        pacer.note_end(plan_of(tokens), (number + 1) / 1000)
    # Each with its own time, whether or not those before it were timed.
    assert [(tokens, round(time, 6)) for tokens, time in seen] == [
        (5, 1), (0, 9), (0, 17), (6, 19), (0, 27),
    ]  # fmt: skip


@pytest.mark.feature("V1")
def test_nothing_is_chosen_for_steps_without_prompts(toys: Toys) -> None:
    engine = toys.engine(max_itl_ms=10.0, max_batch_tokens=8, overlap=False)
    harness, chosen = EngineHarness(engine), []
    make_events = engine.pacer.make_events

    def noted(state: State, *, has_arrivals: bool, **others: Any) -> list[Paced]:
        events = make_events(state, has_arrivals=has_arrivals, **others)
        chosen.append((has_arrivals, bool(events)))
        return events

    engine.pacer.make_events = noted
    fits = engine.pacer.times
    harness.submit(request("a", [1, 2, 3], 12))
    for _ in range(6):
        harness.step()
    assert chosen[0] == (True, True)
    # A fit that cannot be read: to choose would raise.
    engine.pacer.times = None
    for _ in range(3):
        engine.pacer.note_end = lambda plan, seconds: None
        harness.step()
    assert chosen[-3:] == [(False, False)] * 3
    engine.pacer.times = fits
    harness.submit(request("b", list(range(1, 21)), 2))
    harness.step()
    assert chosen[-1][0]
    harness.drain()
    engine.close()


@pytest.mark.feature("V1")
def test_a_prompt_that_goes_on_alone_gets_less_as_its_context_grows(toys: Toys) -> None:
    long = {"num_pages": 900, "max_seq_len": 1_600, "overlap": False}
    engine = toys.engine(max_itl_ms=10.0, max_batch_tokens=256, **long)
    times = StepTimes()
    for tokens in (0, 64, 128, 256) * 20:
        for context in (0, 500, 2000):
            pairs = tokens * (context + tokens / 2)
            work = StepWork(prompt_tokens=tokens, decode_context=100, prompt_pairs=pairs)
            times = times.observe(work, 1 + 0.01 * tokens + 1e-4 * pairs)
    engine.pacer.times, engine.pacer.note_end = times, lambda plan, seconds: None
    harness, make_events, paced = EngineHarness(engine), engine.pacer.make_events, list[int]()

    def noted(state: State, *, has_arrivals: bool, **others: Any) -> list[Paced]:
        events = make_events(state, has_arrivals=has_arrivals, **others)
        if not has_arrivals and not state.waiting:
            paced.extend(event.prompt_tokens for event in events)
        return events

    engine.pacer.make_events = noted
    harness.submit(request("a", [1, 2, 3], 40))
    harness.step()
    harness.submit(request("b", [1 + number % 20 for number in range(1_500)], 2))
    harness.drain()
    engine.close()
    # Of 256 tokens that fit at first, nothing else waiting.
    assert paced == [128, 64]


def test_nothing_is_timed_without_a_bound(toys: Toys) -> None:
    engine = toys.engine(max_itl_ms=None)
    EngineHarness(engine).run([request("a", [1, 2, 3], 4)])
    assert engine.pacer.times.count == 0 and not engine.step_clock.launched
    assert engine.state.pace is None
    engine.close()


GRAPHS = (256, 192, 160, 128, 112, 96, 80)
"""Tokens of steps that have graphs, as a runner lists them."""


def pad(tokens: int) -> int:
    """The tokens of the graph that serves so many."""
    return min(size for size in GRAPHS if tokens <= size)


def serve(
    toys: Toys,
    bound: float | None,
    record: Path | None = None,
    *,
    graphs: bool = False,
) -> list[tuple[int, float]]:
    """Decode rows and milliseconds of each step, on a device of 1 ms and 0.1 ms a prompt token.

    graphs: steps with prompt tokens are padded, decode rows and all, to the sizes of graphs
    """
    rng = np.random.default_rng(5)
    engine = toys.engine(
        max_batch_tokens=256,
        num_pages=400,
        overlap=False,
        max_itl_ms=bound,
        record=None if record is None else str(record),
        record_prompts=record is not None,
    )
    clock, steps = Clock(), []
    engine.step_clock.now = clock
    if graphs:
        engine.pacer.graph_sizes = GRAPHS
    execute = engine.executor.execute

    def timed(plan: Plan, *arguments: Any) -> Any:
        work = StepWork.of(plan)
        tokens = work.prompt_tokens
        if graphs and tokens:
            tokens = pad(tokens + plan.num_decode)
        steps.append((plan.num_decode, 1 + 0.1 * tokens))
        clock.now += steps[-1][1] / 1000
        return execute(plan, *arguments)

    engine.executor.execute = timed
    harness = EngineHarness(engine)
    for number in range(60):
        prompt = rng.integers(0, VOCAB, int(rng.integers(60, 140)))
        harness.submit(request(str(number), prompt, int(rng.integers(2, 20))))
        if number % 4 == 3:
            harness.step()
    harness.drain()
    engine.close()
    return steps


@pytest.mark.feature("V1")
def test_steps_beside_decode_rows_keep_the_bound(toys: Toys) -> None:
    beside = {
        bound: [time for decode, time in serve(toys, bound) if decode] for bound in (None, 10.0)
    }
    assert max(beside[None]) > 20
    assert max(beside[10.0]) <= 10


@pytest.mark.feature("V1")
@pytest.mark.parametrize(
    ("bound", "longest"),
    often(1, [(12.0, 10.6), (18.0, 17.0), (13.5, 12.2), (15.0, 13.8), (21.0, 20.2)]),
)
def test_prompts_fill_the_largest_graph_that_keeps_the_bound(
    toys: Toys, bound: float, longest: float
) -> None:
    beside = [time for decode, time in serve(toys, bound, graphs=True) if decode]
    assert max(beside) == pytest.approx(longest)


@pytest.mark.feature("V1")
def test_a_bounded_schedule_replays(toys: Toys, tmp_path: Path) -> None:
    serve(toys, 10.0, tmp_path / "steps.recording")
    recording = read_recording(tmp_path / "steps.recording")
    events = [event for step in recording.read_steps() for event in step.events]
    assert any(isinstance(event, Paced) for event in events)
    result = replay_recording(recording, restore_limits(recording.header))
    assert result.divergence is None and result.steps > 60


def floor_milliseconds(work: StepWork) -> float:
    """A device that takes no less than 6.5 ms where chunks go on behind 2,048 tokens."""
    device = 1.8 + 3.3e-3 * work.prompt_tokens + 5e-7 * work.prompt_pairs
    device += 1e-5 * work.decode_context
    is_long = work.prompt_tokens and work.prompt_pairs > 2048 * work.prompt_tokens
    return max(device, 6.5) if is_long else device


def cut_prompts(bound: float, prompts: int, seed: int, noise: float) -> list[tuple[int, float]]:
    """Chunks and milliseconds of prompts of 8,000 tokens beside 16 rows that decode."""
    rng, times, steps = np.random.default_rng(seed), StepTimes(), list[tuple[int, float]]()

    def run(work: StepWork) -> float:
        nonlocal times
        taken = floor_milliseconds(work) * float(rng.uniform(1, 1 + noise))
        times = times.observe(work, taken)
        return taken

    run(StepWork(prompt_tokens=8192, prompt_pairs=16 * 512 * 256))
    for _ in range(prompts):
        done = 0
        while done < 8000:
            tokens = choose_prompt_tokens(
                times, decode_context=20_000, context=done, bound=bound, most=8192
            )
            tokens = min(tokens, 8000 - done)
            steps.append((tokens, run(prompt_work(tokens, done, 20_000))))
            done += tokens
        run(StepWork(decode_context=20_000))
    return steps


@pytest.mark.feature("V1")
@settings(max_examples=count_examples(20))
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 0.15))
@pytest.mark.parametrize(("bound", "most"), [(4.0, 6.5 * 1.25), (8.0, 8.0)])
def test_what_launches_take_is_not_laid_to_tokens(
    bound: float, most: float, seed: int, noise: float
) -> None:
    steps = cut_prompts(bound, 60, seed, noise)
    # 1,024 tokens behind 4,000 take 7.6 ms, and 512 no less than the floor.
    assert np.mean([tokens for tokens, _ in steps]) >= 400
    assert np.quantile([taken for _, taken in steps], 0.9) <= most * (1 + noise) + 0.5


def short_steps(taken: list[float], largest: int = 4096) -> StepTimes:
    times = StepTimes().observe(prompt_work(largest, decode_context=0), 20.0)
    times = times.observe(StepWork(), 2.0)
    for each in taken:
        times = times.observe(prompt_work(64, decode_context=0), each)
    return times


def test_a_floor_is_what_short_steps_evenly_take_beyond_their_terms() -> None:
    asked = prompt_work(64, decode_context=0)
    assert short_steps([6.5, 7.0] * 8).find_floor(asked) == 6.5
    assert short_steps([6.5] * 7).find_floor(asked) == 0.0  # few were seen
    assert short_steps([2.3, 6.5] * 8).find_floor(asked) == 0.0
    assert short_steps([2.3] * 16).find_floor(asked) == 0.0
    assert short_steps([6.5] * 16, largest=500).find_floor(asked) == 0.0
    assert short_steps([6.5] * 16).find_floor(StepWork()) == 0.0


def test_a_floor_is_forgotten_where_no_short_step_shows_it() -> None:
    times, asked = short_steps([6.5] * 16), prompt_work(64, decode_context=0)
    for _ in range(200):
        times = times.observe(prompt_work(1024, decode_context=0), 8.0)
    assert times.find_floor(asked) == 6.5
    for _ in range(60):
        times = times.observe(prompt_work(1024, decode_context=0), 8.0)
    assert times.find_floor(asked) == 0.0


@pytest.mark.feature("V1")
def test_short_steps_that_tokens_explain_show_no_floor() -> None:
    # 64 tokens behind 15,000 take 14 ms on this device, all alike.
    times = fitted(np.random.default_rng(6))
    for number in range(20):
        work = prompt_work(64, 15_000 + 64 * number)
        times = times.observe(work, milliseconds(work))
    assert times.find_floor(prompt_work(64)) == 0.0
    chosen = choose_prompt_tokens(times, decode_context=50_000, context=0, bound=8.0, most=4096)
    assert chosen == 128


def chosen_chunks(times: StepTimes, count: int, slower: float = 1.0) -> tuple[StepTimes, list[int]]:
    """The fit after so many chunks under a bound of 8 ms, and their tokens.

    A device without a floor, so many times slower.
    """

    def taken(work: StepWork) -> float:
        device = 1.8 + 3.3e-3 * work.prompt_tokens + 5e-7 * work.prompt_pairs
        return slower * (device + 1e-5 * work.decode_context)

    chunks = []
    for number in range(count):
        context = 1000 * (number % 8)
        tokens = choose_prompt_tokens(
            times, decode_context=20_000, context=context, bound=8.0, most=8192
        )
        chunks.append(tokens)
        work = prompt_work(tokens, context, 20_000)
        times = times.observe(work, taken(work))
    return times, chunks


@pytest.mark.feature("V1")
@pytest.mark.parametrize("first", [60.0, 500.0, 2250.0])
def test_a_kernel_that_was_compiled_at_first_keeps_no_chunk_short(first: float) -> None:
    times = StepTimes().observe(prompt_work(2048, decode_context=0), first)
    _, chunks = chosen_chunks(times, 1200)
    assert np.mean(chunks[-100:]) > 600


@pytest.mark.feature("V1")
def test_a_slow_phase_keeps_no_chunk_short() -> None:
    times, chunks = chosen_chunks(StepTimes(), 200)
    times, slow = chosen_chunks(times, 500, slower=3.5)
    _, after = chosen_chunks(times, 400)
    assert np.mean(slow[-100:]) < 200 and np.mean(after[-100:]) >= 0.95 * np.mean(chunks[-100:])


def test_a_floor_follows_what_decode_rows_read() -> None:
    times = StepTimes()
    for number in range(40):
        for work in (prompt_work(1024, 0, 1000 * number), StepWork(decode_context=1000 * number)):
            times = times.observe(work, 2 + 0.003 * work.prompt_tokens + 1e-4 * work.decode_context)
    for number in range(16):
        times = times.observe(prompt_work(64, 0, 5000 * number), 6.0 + 1e-4 * 5000 * number)
    for context in (0, 60_000):
        floor = times.find_floor(prompt_work(64, 0, context))
        assert floor == pytest.approx(6.0 + 1e-4 * context, rel=0.03)


def test_a_step_that_took_its_floor_is_no_error() -> None:
    times = short_steps([6.5] * 16)
    errors = times.errors
    for _ in range(64):
        times = times.observe(prompt_work(64, decode_context=0), 6.5)
    assert max(errors) > 1 and max(times.errors) == pytest.approx(0.0)


@pytest.mark.parametrize("tokens", [64, 1024])
def test_a_floor_lasts_as_long_as_steps_show_it(tokens: int) -> None:
    times, asked = short_steps([6.5] * 16), prompt_work(64, decode_context=0)
    for _ in range(600):
        times = times.observe(prompt_work(tokens, decode_context=0), 6.6)
    assert times.find_floor(asked) == pytest.approx(6.5, abs=0.11)


@pytest.mark.feature("V1")
def test_a_floor_above_the_bound_is_known_from_steps_of_more_than_the_fewest_tokens() -> None:
    times = StepTimes().observe(prompt_work(4096, decode_context=0), 15.5)
    times = times.observe(StepWork(), 2.0)
    for _ in range(16):
        times = times.observe(prompt_work(112, decode_context=0), 6.5)
    assert times.num_least == 0
    chosen = choose_prompt_tokens(times, decode_context=0, context=0, bound=4.0, most=8192)
    assert chosen == 2048  # by its terms some 8 ms, 1.25 times the floor
