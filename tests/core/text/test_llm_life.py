"""Interrupts, cancellation, failures and closing of the LLM object."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from headstock import LLM, SamplingParams
from headstock.errors import EngineDied, UsageError
from headstock.outputs import RequestOutput

Make = Callable[..., tuple[LLM, Any]]
SHORT = SamplingParams(max_tokens=8, temperature=0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_closing_a_stream_aborts_its_request(scripted: Make) -> None:
    llm, loop = scripted(max_seq_len=1 << 14)
    stream = llm.stream("x", SamplingParams(max_tokens=None))
    next(stream)
    assert list(loop.rows) == ["0"]
    stream.close()  # type: ignore[attr-defined]
    assert loop.aborted == ["0"] and loop.rows == {}


def test_an_interrupt_aborts_everything_and_the_llm_lives_on(scripted: Make) -> None:
    llm, loop = scripted(max_seq_len=1 << 14)
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=None))
    wait_for(lambda: loop.rows == {})
    assert sorted(loop.aborted) == ["0", "1", "2"]
    assert len(llm.generate("a", SHORT)) == 1


async def gather(llm: LLM, count: int) -> list[RequestOutput]:
    return await asyncio.gather(
        *(llm.generate_async(f"hello {number}", SHORT) for number in range(count))
    )


def test_async_answers_equal_the_others(scripted: Make) -> None:
    llm, _ = scripted()
    found = asyncio.run(gather(llm, 10))
    assert [each.outputs for each in found] == [
        each.outputs for each in llm.generate([f"hello {number}" for number in range(10)], SHORT)
    ]


@pytest.mark.parametrize(
    ("prompt", "on_thread"), [([5, 6], False), ("x", True), ([5] * 4097, True)]
)
def test_only_prompts_that_take_long_to_check_are_checked_on_a_thread(
    prompt: str | list[int], on_thread: bool, scripted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = scripted(max_seq_len=1 << 14)
    processor, threads = llm._session.input_processor, []
    process = processor.process

    def note(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return process(*arguments)

    monkeypatch.setattr(processor, "process", note)
    output = asyncio.run(llm.generate_async(prompt, SHORT))
    assert output.finished and (threads != [threading.current_thread()]) == on_thread


def test_what_a_caller_does_to_an_output_reaches_no_running_request(scripted: Make) -> None:
    llm, _ = scripted()
    for piece in llm.stream([5, 6, 7], SHORT):
        # One list of its own a piece, and nothing else that holds the prompt.
        piece.prompt_token_ids.clear()
        public = [name for name in dir(piece) if not name.startswith("_")]
        assert not any(isinstance(getattr(piece, name), array) for name in public)
    assert llm.generate([[5, 6, 7]], SHORT)[0].prompt_token_ids == [5, 6, 7]


async def first_pieces(llm: LLM, count: int) -> list[RequestOutput]:
    pieces: list[RequestOutput] = []
    async with aclosing(llm.astream("x", SamplingParams(max_tokens=None))) as stream:  # type: ignore[type-var]
        async for piece in stream:
            pieces.append(piece)
            if len(pieces) == count:
                break
    return pieces


def test_leaving_an_async_stream_aborts_its_request(scripted: Make) -> None:
    llm, loop = scripted(max_seq_len=1 << 14)
    assert len(asyncio.run(first_pieces(llm, 3))) == 3
    assert loop.aborted == ["0"] and loop.rows == {}


async def cancelled(llm: LLM, loop: Any) -> None:
    task = asyncio.create_task(llm.generate_async("x", SamplingParams(max_tokens=None)))
    while not loop.rows and not task.done():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelling_an_async_request_aborts_it(scripted: Make) -> None:
    llm, loop = scripted(max_seq_len=1 << 14)
    asyncio.run(cancelled(llm, loop))
    assert loop.aborted == ["0"] and loop.rows == {}


def test_a_request_that_the_engine_refuses_fails_alone(scripted: Make) -> None:
    llm, _ = scripted(refuse={"1"})
    outputs = llm.generate(["a", "b", "c"], SHORT)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].error == "refused by the script"


def test_a_dead_engine_raises(scripted: Make) -> None:
    llm, loop = scripted(max_seq_len=1 << 14)
    stream = llm.stream("x", SamplingParams(max_tokens=None))
    next(stream)
    loop.die()
    with pytest.raises(EngineDied, match="the engine died"):
        list(stream)
    with pytest.raises(EngineDied):
        llm.generate("x", SHORT)


def test_close_is_idempotent_and_two_live_side_by_side(scripted: Make) -> None:
    first, loop = scripted()
    second, _ = scripted()
    with first:
        assert first.generate("a", SHORT)[0].outputs == second.generate("a", SHORT)[0].outputs
    first.close()
    assert loop.closed == 1
    with pytest.raises(UsageError, match="this LLM is closed"), first:
        raise AssertionError("a closed LLM was entered")
    with pytest.raises(UsageError, match="this LLM is closed"):
        first.generate("a", SHORT)
    assert second.generate("a", SHORT)
