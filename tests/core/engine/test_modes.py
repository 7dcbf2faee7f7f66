"""The ways to keep less than usual, on the real engine and the toy model: the same tokens, and what
is kept.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from often import often
from toy_engine import EngineHarness, Toys, expected, installed, request

from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import CannotRun, CapacityError
from headstock.scheduler import Plan

RNG = np.random.default_rng(51)
NAMES = map(str, itertools.count())


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    """The toy model and its parts."""
    with installed(tmp_path) as toys_folder:
        yield toys_folder


def tokens(length: int) -> np.ndarray:
    """A random prompt."""
    return RNG.integers(0, 50, length).astype(np.int32)


def hits(harness: EngineHarness, prompt: np.ndarray) -> int:
    """Run the prompt to its end: how many of its tokens were cached."""
    output_tracker = harness.engine.output_tracker
    before = output_tracker.cached_tokens
    harness.run([request(next(NAMES), prompt, 5)])
    return output_tracker.cached_tokens - before


@pytest.mark.feature("T13", "T17")
def test_prefix_cache_n_0_never_hits(toys: Toys) -> None:
    harness = EngineHarness(toys.engine(prefix_cache_n=0))
    prompt = tokens(40)

    assert [hits(harness, prompt) for _ in range(3)] == [0, 0, 0]
    harness.run(request(next(NAMES), prompt) for _ in range(4))
    assert harness.engine.output_tracker.cached_tokens == harness.engine.stats().cached_pages == 0
    assert (
        "prefix reuse",
        "off",
        "prefix_cache_n (--prefix-cache-n) 0",
    ) in harness.engine.summary.table


@pytest.mark.feature("T13", "T17")
def test_prefix_cache_n_1_drops_the_oldest_which_is_computed_in_full(toys: Toys) -> None:
    harness = EngineHarness(toys.engine(prefix_cache_n=1))
    first, second = tokens(40), tokens(40)

    assert [hits(harness, prompt) for prompt in (first, first, second, second, first, first)] == [
        0,
        36,
        0,
        36,
        0,
        36,
    ]


@pytest.mark.feature("T17")
def test_an_unlimited_cache_keeps_both(toys: Toys) -> None:
    harness = EngineHarness(toys.engine())
    first, second = tokens(40), tokens(40)

    assert [hits(harness, prompt) for prompt in (first, second, first, second)] == [0, 0, 36, 36]


@pytest.mark.feature("T13", "T17")
@pytest.mark.parametrize("n", often(1, [1, 0, 2]))
def test_the_limit_changes_no_token_whatever_comes_together(toys: Toys, n: int) -> None:
    harness = EngineHarness(toys.engine(prefix_cache_n=n, num_pages=45, max_batch_tokens=20))
    shared = tokens(30)
    for count in (1, 6, 3):
        harness.run(
            request(next(NAMES), np.concatenate([shared, tokens(int(RNG.integers(0, 9)))]), 30)
            for _ in "x" * count
        )

    assert set(harness.reasons.values()) == {"length"}


@pytest.mark.feature("T14")
@pytest.mark.parametrize(
    ("paged", "overlap"),
    often(1, [("on", True), ("off", False), ("on", False), ("off", True)]),
)
def test_no_kv_cache_recomputes_everything_in_chunks_stopped_and_preempted(
    toys: Toys, paged: str, overlap: bool
) -> None:
    small = {
        "num_pages": 25 if paged == "on" else None,
        "max_batch_tokens": 16,
        "max_running_requests": 2,
    }
    engine = toys.engine(kv_cache=False, overlap=overlap, paged_attn=paged, **small)
    plans: list[Plan] = []
    record_step = engine.recorder.record_step

    def watched(events: Any, state: Any, plan: Plan) -> None:
        plans.append(plan)
        record_step(events, state, plan)

    engine.recorder.record_step = watched  # type: ignore[method-assign]
    harness = EngineHarness(engine)
    prompts = [tokens(length) for length in (3, 16, 17, 45, 60, 33)]
    requests = [request(next(NAMES), prompt, 12) for prompt in prompts]
    stops = [request(next(NAMES), one.prompt, 12, stop_ids=(expected(one)[4],)) for one in requests]
    for one in (*requests, *stops):
        harness.submit(one)
    while engine.stats().running < 2:
        harness.step()
    harness.run([request("high", tokens(20), 12, priority=1)])

    assert {harness.reasons[one.id] for one in stops} == {"stop"}
    stats = engine.stats()
    assert stats.cached_tokens == stats.cached_pages == 0 and stats.preemptions > 0
    assert ("prefix reuse", "off", "kv_cache (--kv-cache) off") in engine.summary.table
    reached: dict[int, int] = {}
    for plan in plans:
        for order, start, stop, sampled in zip(
            *map(list, (plan.admission_ids, plan.starts, plan.stops, plan.samples)), strict=True
        ):
            assert start == reached.get(int(order), 0), (
                "a token was computed from what an earlier one left behind"
            )
            reached[int(order)] = 0 if sampled else int(stop)


@pytest.mark.feature("T16")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_extends_an_ended_one_computes_only_the_rest(
    toys: Toys, overlap: bool
) -> None:
    for settings, reused in (
        ({}, 44),
        ({"paged_attn": "off"}, 46),
        ({"paged_attn": "off", "cache_type": "naive"}, 0),
    ):
        harness = EngineHarness(
            toys.engine(
                overlap=overlap, num_pages=None if "paged_attn" in settings else 100, **settings
            )
        )
        prompt = tokens(40)
        harness.run([request("a", prompt, 7)])
        whole = np.concatenate([prompt, harness.outputs["a"]])

        assert hits(harness, np.concatenate([whole, tokens(9)])) == reused


@pytest.mark.feature("T16")
def test_without_pages_a_mere_common_prefix_is_computed_again(toys: Toys) -> None:
    harness = EngineHarness(toys.engine(paged_attn="off", num_pages=None))
    prompt = tokens(40)

    assert [hits(harness, prompt), hits(harness, np.concatenate([prompt[:30], tokens(20)]))] == [
        0,
        0,
    ]
    assert (
        "page size",
        "one region each",
        "paged_attn (--paged-attn) off",
    ) in harness.engine.summary.table
    assert (
        "prefix reuse",
        "of whole sequences",
        "paged_attn (--paged-attn) off",
    ) in harness.engine.summary.table


@pytest.mark.feature("T17")
def test_in_contiguous_mode_prefix_cache_n_bounds_the_regions_kept(toys: Toys) -> None:
    harness = EngineHarness(toys.engine(paged_attn="off", num_pages=None, prefix_cache_n=1))
    talks = []
    for name in "ab":
        prompt = tokens(20)
        harness.run([request(name, prompt, 5)])
        talks.append(np.concatenate([prompt, harness.outputs[name], [1]]))

    assert [hits(harness, talk) for talk in talks] == [0, 0]
    assert harness.engine.stats().cached_pages == 1


@pytest.mark.feature("T8")
def test_the_pool_is_a_region_a_row_or_what_was_asked_for(toys: Toys) -> None:
    for settings, pages in (({}, 8), ({"num_pages": 3}, 3), ({"kv_context_len": 320}, 2)):
        harness = EngineHarness(toys.engine(paged_attn="off", **({"num_pages": None} | settings)))
        harness.run(request(next(NAMES), tokens(9)) for _ in range(12))

        assert (
            harness.engine.limits.num_pages == (pages,) and harness.engine.limits.page_size == 160
        )


@pytest.mark.feature("H16")
def test_refused_at_the_threshold_accepted_just_below_and_again_once_freed() -> None:
    engine = Engine(
        EngineConfig(
            num_pages=20,
            on_pressure="reject",
            memory_threshold=0.5,
            cache_type="naive",
            overlap=False,
        )
    )
    try:
        just_below, one_more = (request(next(NAMES), tokens(length), 4) for length in (9 * 16, 3))
        engine.submit(just_below)
        assert engine.memory_pressure == 0.45
        engine.submit(one_more)  # at 9 of 20 pages
        assert engine.memory_pressure == 0.5
        with pytest.raises(
            CapacityError,
            match=r"50% of the KV pool is in use .*--memory-threshold\) is 0\.5",
        ):
            engine.submit(request("refused", tokens(3), 4))  # at exactly 10
        assert not engine.output_tracker.has_request("refused")
        engine.step()
        assert engine.memory_pressure == 0.5, (
            "running requests count as they did when they were queued"
        )
        engine.abort(just_below.id)
        engine.step()
        engine.submit(request("accepted", tokens(3), 4))
        while engine.has_work:
            engine.step()
        assert engine.memory_pressure == 0 and engine.stats().failed == 0
    finally:
        engine.close()


@pytest.mark.feature("H16")
def test_a_request_counts_once_at_every_moment_of_the_step_that_seats_it(toys: Toys) -> None:
    engine = toys.engine(num_pages=100, on_pressure="reject", memory_threshold=0.9, overlap=False)
    engine.submit(request(next(NAMES), tokens(40), 4))
    before = engine.memory_pressure
    seen = set()

    def look(frame: object, event: str, value: object) -> None:
        seen.add(engine.memory_pressure)

    sys.setprofile(look)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert len(engine.output_tracker.by_admission_id) == 1
    assert seen == {before}


@pytest.mark.feature("H16")
@pytest.mark.parametrize("window", [None, 9])
def test_a_prompt_in_chunks_counts_whole_from_the_first_one_on(
    toys: Toys, window: int | None
) -> None:
    engine = toys.engine(
        num_pages=100,
        on_pressure="reject",
        memory_threshold=0.9,
        overlap=False,
        max_batch_tokens=16,
        window=window,
    )
    engine.submit(request(next(NAMES), tokens(100), 1))
    before = engine.memory_pressure
    seen = []
    while engine.has_work:
        seen.append(engine.memory_pressure)
        engine.step()
    engine.close()
    assert len(seen) > 6 and before > 0.1
    assert all(abs(each - before) <= 0.05 for each in seen), seen


@pytest.mark.feature("H16")
def test_decoding_goes_on_above_the_threshold(toys: Toys) -> None:
    harness = EngineHarness(toys.engine(num_pages=30, on_pressure="reject", memory_threshold=0.3))
    harness.submit(request("a", tokens(30), 60))
    refused = 0
    while harness.engine.has_work:
        harness.step()
        if harness.engine.memory_pressure >= 0.3:
            with pytest.raises(CapacityError):
                harness.engine.submit(request("b", tokens(4)))
            refused += 1

    assert refused > 40 and harness.reasons == {"a": "length"}


@pytest.mark.feature("H16")
def test_a_preempted_request_counts_with_the_pages_that_it_will_take_again(toys: Toys) -> None:
    harness = EngineHarness(
        toys.engine(
            num_pages=12, page_size=4, on_pressure="reject", cache_type="naive", overlap=False
        )
    )
    for name in "ab":
        harness.submit(request(name, tokens(18), 20))
    while not harness.engine.state.num_preempted:
        harness.step()

    assert harness.engine.memory_pressure == 1.0
    with pytest.raises(CapacityError, match="100% of the KV pool"):
        harness.engine.submit(request("c", tokens(4)))
    harness.run([])
    assert harness.reasons == {"a": "length", "b": "length"}


RUNNER = """
from headstock.spi import DeviceRange, GraphSupport, LayoutKind
from headstock.spi import RunnerCapabilities, RunnerSpec, SpiRange

def spec():
    return RunnerSpec(
        name="replaying",
        spi=SpiRange(0, 3),
        summary="needs graphs",
        implementation="headstock.builtin.eager:EagerRunner",
        capabilities=RunnerCapabilities(devices=(DeviceRange("DEVICE"),),
        needs_graph=GraphSupport.DECODE, layouts=frozenset(LayoutKind)),
    )
"""


def install_runner(toys: Toys, device: str) -> None:
    """Install a runner "replaying" that needs graphs and serves one kind of device."""
    module = f"replaying_on_{device}"  # Python keeps modules from test to test
    info = toys.folder / "headstock_replaying-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: headstock-replaying\nVersion: 0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        f"[headstock.runner]\nreplaying = {module}:spec\n", encoding="utf-8"
    )
    (toys.folder / f"{module}.py").write_text(RUNNER.replace("DEVICE", device), encoding="utf-8")


@pytest.mark.feature("G4")
@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        ({"runner": "auto", "cuda_graph_max_bs": 8}, "(--cuda-graph-max-bs) 8"),
        ({"runner": "auto"}, None),
        ({"runner": "auto", "cuda_graph_max_bs": 0}, None),
        ({"runner": "auto", "cuda_graph_max_bs": 1}, None),  # a chat's own limit
        ({"runner": "eager"}, None),
    ],
)
def test_graphs_asked_for_on_a_cpu_run_eagerly_with_one_info_line(
    toys: Toys, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], ignored: str | None
) -> None:
    install_runner(toys, "cuda")
    with caplog.at_level(logging.INFO, "headstock"):
        engine = toys.engine(**settings)

    assert engine.summary.runner == "eager"
    lines = [record for record in caplog.records if "graphs" in record.getMessage()]
    assert [line.levelname for line in lines] == ([] if ignored is None else ["INFO"])
    assert all(
        "no graphs on a CPU" in line.getMessage() and str(ignored) in line.getMessage()
        for line in lines
    )
    EngineHarness(engine).run([request("a", tokens(9))])
    engine.close()


class Unread(dict[str, Any]):
    """A mapping of which one key may be looked up, and that is never walked."""

    def __iter__(self) -> Any:
        raise AssertionError("who arrives pays for everyone who waits")

    items = values = keys = __iter__


@pytest.mark.feature("H16")
def test_what_those_who_wait_will_need_is_known_without_a_look_at_each(toys: Toys) -> None:
    harness = EngineHarness(
        toys.engine(num_pages=400, on_pressure="reject", max_running_requests=2, overlap=False)
    )
    for number in range(40):
        harness.submit(request(str(number), range(number % 30, number % 30 + 20), 4))
    harness.step()
    harness.engine.output_tracker.requests = Unread(harness.engine.output_tracker.requests)
    pressure = harness.memory_pressure

    assert harness.engine.memory_pressure == pressure > 0.4
    harness.engine.submit(request("new", range(20), 4))


@pytest.mark.feature("G4")
@pytest.mark.parametrize(
    "more", [{}, {"cuda_graph_max_bs": 8}, {"paged_attn": "off", "num_pages": None}], ids=str
)
def test_a_runner_of_graphs_that_is_named_is_refused_on_a_cpu(
    toys: Toys, more: dict[str, Any]
) -> None:
    install_runner(toys, "cuda")
    with pytest.raises(
        CannotRun,
        match=r"^runner \(--runner\) replaying cannot run on cpu; set it to eager$",
    ) as raised:
        toys.engine(runner="replaying", **more)

    assert raised.value.exit_code == 5


@pytest.mark.parametrize(("most", "warnings"), [(0, 1), (1 << 30, 0)])
def test_a_watch_over_a_large_pool_is_announced_with_its_size(
    toys: Toys,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    warnings: int,
) -> None:
    monkeypatch.setattr("headstock.startup.build.MAX_QUIET_CANARY_BYTES", most)
    engine = toys.engine(debug_canary=True)
    messages = [
        str(record.msg) for record in caplog.records if "the whole KV pool" in str(record.msg)
    ]
    assert len(messages) == warnings
    assert all(
        "pool=" in line and "(--debug-canary)" in line and "(--num-pages) 256" in line
        for line in messages
    )
    engine.close()


@pytest.mark.feature("P12")
def test_graphs_asked_for_in_contiguous_mode_run_eagerly_with_one_warning(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    install_runner(toys, "cpu")
    with caplog.at_level(logging.WARNING, "headstock"):
        engine = toys.engine(paged_attn="off", num_pages=None, runner="replaying")
        quiet = toys.engine(paged_attn="off", num_pages=None, runner="eager")

    assert engine.summary.runner == quiet.summary.runner == "eager"
    (warning,) = caplog.records
    assert "(--paged-attn) off" in str(warning.msg) and "(--runner) replaying" in str(warning.msg)
    EngineHarness(engine).run([request("a", tokens(9))])
    engine.close()
    quiet.close()
