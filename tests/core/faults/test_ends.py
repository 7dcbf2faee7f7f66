"""An engine that ends while others wait for it: they all hear of it, whatever happens to whoever
ends it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import patience
import pytest
from toy_engine import Toys, request
from toy_text import toy_llm

from headstock import LLM, SamplingParams
from headstock.engine.loop import Loop
from headstock.errors import EngineDied, RequestError
from headstock.outputs import Update

PROMPT = {"prompt_token_ids": [5, 9, 3]}
LONG = SamplingParams(temperature=0.0, max_tokens=2_000, ignore_eos=True)
SIZES = {"max_seq_len": 2_048, "num_pages": 1_600, "debug_invariants": False}


class Waiting(threading.Thread):
    """Somebody who waits for an answer in a thread of their own."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(daemon=True)
        self.llm = llm
        self.ended: Any = None
        self.start()

    def run(self) -> None:
        """Wait."""
        try:
            self.ended = self.llm.generate([PROMPT], LONG)[0].outputs[0].finish_reason
        except EngineDied as error:
            self.ended = error


@pytest.fixture
def held_llm(toys: Toys) -> Iterator[tuple[LLM, Waiting, threading.Event]]:
    """An engine in the middle of a step that ends when the event is set, and somebody who waits for
    it.
    """
    llm = toy_llm(toys.folder, **SIZES)
    step, begun, go_on = llm._session.engine.step, threading.Event(), threading.Event()

    def slow(*deliver: Any) -> tuple[Update, ...]:
        begun.set()
        go_on.wait(patience.seconds)
        return step(*deliver)

    llm._session.engine.step = slow
    waiting = Waiting(llm)
    assert begun.wait(patience.seconds)
    yield llm, waiting, go_on
    go_on.set()
    llm.close()


def interrupted(llm: LLM) -> None:
    """Close the engine, which is in the middle of a step, and be interrupted at that."""
    ident = threading.main_thread().ident
    assert ident is not None
    interrupt = threading.Timer(0.2, signal.pthread_kill, [ident, signal.SIGINT])

    def close() -> None:
        interrupt.start()
        llm.close()

    with pytest.raises(KeyboardInterrupt):
        close()


def test_who_waits_hears_of_a_close_that_was_interrupted(
    held_llm: tuple[LLM, Waiting, threading.Event],
) -> None:
    llm, waiting, go_on = held_llm
    interrupted(llm)
    go_on.set()
    waiting.join(patience.seconds)

    assert waiting.ended == "abort"


def test_a_close_after_one_that_was_interrupted_waits_for_the_step(
    held_llm: tuple[LLM, Waiting, threading.Event],
) -> None:
    llm, waiting, go_on = held_llm
    interrupted(llm)
    threading.Timer(0.2, go_on.set).start()
    llm.close()

    assert go_on.is_set() and llm._session.loop.has_ended and llm._session.loop.failure is None
    waiting.join(patience.seconds)
    assert waiting.ended == "abort"


class Full(logging.Handler):
    """A log on a disk that is full."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_hears_that_the_engine_died_though_nothing_can_be_logged(toys: Toys) -> None:
    handler = Full()
    logging.getLogger("headstock").addHandler(handler)
    try:
        with toy_llm(toys.folder, faults=("schedule@4",), **SIZES) as llm:
            waiting = Waiting(llm)
            waiting.join(patience.seconds)
    finally:
        logging.getLogger("headstock").removeHandler(handler)

    assert isinstance(waiting.ended, EngineDied)


def test_a_signal_handler_may_close_the_engine_while_a_request_is_handed_over(toys: Toys) -> None:
    llm = toy_llm(toys.folder, **SIZES)
    check = llm._session.engine.check_request

    def closing(one: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        check(one)

    llm._session.engine.check_request = closing
    before = signal.signal(signal.SIGTERM, lambda *_: llm.close())
    try:
        with pytest.raises(EngineDied, match="the engine is closed"):
            llm.generate([PROMPT], LONG)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_name_is_taken_until_its_end_has_been_told(toys: Toys) -> None:
    loop = Loop(toys.engine())
    updates: list[Update] = []
    between, go_on = threading.Event(), threading.Event()

    def watch(update: Update) -> None:
        """Told of its end before "a" is: stops the thread when the engine is done with "a"."""
        if updates and not loop.engine.output_tracker.has_request("a") and "a" in loop.sinks:
            between.set()
            go_on.wait(patience.seconds)

    loop.submit(request("other", [1, 2, 3], 3), watch)
    loop.submit(request("a", [1, 2, 4], 3), updates.append)
    assert between.wait(patience.seconds)
    with pytest.raises(RequestError, match="in use"):
        loop.submit(request("a", [1, 2, 4], 3), updates.append)
    go_on.set()
    loop.close()
    loop.engine.close()

    assert updates[-1].finish_reason == "length"
