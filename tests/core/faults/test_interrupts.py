"""Ctrl-C at every moment of handing requests over and hearing of them: nothing is left running, and
nobody waits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import patience
import pytest
from attrs import evolve
from toy_engine import Toys
from toy_text import toy_llm

from headstock import LLM, SamplingParams
from headstock.errors import EngineDied
from headstock.record.file import read_recording

WATCHED = {"headstock.llm", "headstock.requests.client", "headstock.requests.session",
           "headstock.engine.loop",
           "headstock.engine.engine", "headstock.engine.output_tracker",
           "headstock.execution.threaded", "headstock.record.recorder",
           "concurrent.futures.thread", "threading", "contextlib"}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [5 + number, 9, 3]} for number in range(3)]
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# Takes seconds: whoever is not aborted is found running, or to have said all that.
ENDLESS = evolve(SHORT, max_tokens=2_000)
SIZES = {"max_seq_len": 2_048, "num_pages": 1_600, "debug_invariants": False}


class Interrupt:
    """Raises KeyboardInterrupt at the `nth` place, in the watched modules, where Python looks for
    signals: as a function begins, and when one that is written in C returns. (Not as a generator
    goes on: what is raised there is not raised in the generator.)
    """

    def __init__(self, nth: int) -> None:
        self.remaining = nth

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        begins = event == "call" and not frame.f_code.co_flags & CO_GENERATOR
        if (begins or event == "c_return") and frame.f_globals.get("__name__") in WATCHED:
            self.remaining -= 1
            if self.remaining == 0:
                raise KeyboardInterrupt


def broken_off(work: Callable[[], Any], nth: int) -> bool:
    """Whether the work was interrupted at the `nth` place; False when it has none so late."""
    before = sys.getprofile()
    sys.setprofile(Interrupt(nth))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


def left_behind(llm: LLM) -> dict[str, Any]:
    """What is still there some seconds later of requests without a waiting caller."""
    deadline = time.monotonic() + patience.seconds
    while True:
        engine = llm._session.engine
        remaining = {"work": engine.has_work, "sinks": dict(llm._session.loop.sinks),
        "accounts": dict(engine.output_tracker.requests),
                "asked": dict(engine.arrivals.requests)}  # fmt: skip
        if not any(remaining.values()) or time.monotonic() > deadline:
            return {name: what for name, what in remaining.items() if what}
        time.sleep(0.001)


def generate(llm: LLM) -> None:
    """Several requests whose answers are dropped."""
    llm.generate(PROMPTS, ENDLESS)


def leave(llm: LLM) -> None:
    """A stream that is left after some tokens."""
    with closing(llm.stream(PROMPTS[0], ENDLESS)) as stream:  # type: ignore[type-var]
        for _ in range(4):
            next(stream)


@pytest.mark.parametrize(("use", "most"), [(generate, 110), (leave, 1000)])
def test_an_interrupt_anywhere_leaves_nothing_running_and_an_engine_that_answers(
    toys: Toys, use: Callable[[LLM], None], most: int
) -> None:
    with toy_llm(toys.folder, **SIZES) as llm:
        expected = [answer.outputs for answer in llm.generate(PROMPTS, SHORT)]
        nth = 1
        while nth <= most and broken_off(partial(use, llm), nth):
            before = llm._session.engine.stats().output_tokens
            assert left_behind(llm) == {}, f"runs on, interrupted at place {nth}"
            assert llm._session.engine.stats().output_tokens - before < 1_000, (
                f"runs on to its end, interrupted at place {nth}"
            )
            nth += 1
        assert nth > 60
        assert [answer.outputs for answer in llm.generate(PROMPTS, SHORT)] == expected


def test_a_closing_that_is_interrupted_anywhere_can_be_repeated(toys: Toys, tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    file = tmp_path / "a.recording"
    nth, interrupted = 0, True
    while interrupted:
        nth += 3  # each third place, for an engine takes a while to make
        llm = toy_llm(toys.folder, record=str(file), **SIZES)
        stream = llm.stream(PROMPTS[0], ENDLESS)
        next(stream)
        interrupted = broken_off(llm.close, nth)
        llm.close()
        # whom the interrupt kept from hearing that its request was aborted
        with suppress(EngineDied):
            # A busy machine may take so long that all its tokens come before.
            assert list(stream)[-1].outputs[0].finish_reason in ("abort", "length")
        assert {thread.name for thread in threading.enumerate()} == before, (
            f"interrupted at place {nth}"
        )
        recording = read_recording(file)
        assert list(recording.read_steps()) and recording.is_complete
        file.unlink()

    assert nth > 20
