"""How updates reach the tasks of an event loop: all of them, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock import LLM, RequestOutput, SamplingParams
from headstock.errors import EngineDied
from headstock.llm import get_session
from headstock.outputs import TokenLogprob, Update
from headstock.requests.inbox import Inbox, TimedUpdate, UpdateQueue, join_updates

Make = Callable[..., tuple[LLM, Any]]


def put_all(inbox: Inbox, queues: Iterable[UpdateQueue], count: int) -> None:
    """Put the updates 0, 1, ... into each queue, by turns."""
    queues = list(queues)
    for number in range(count):
        for queue in queues:
            inbox.put(queue, (Update(id="", tokens=(number,)), float(number)))


async def take(queue: UpdateQueue, count: int) -> list[int]:
    """The numbers of so many updates."""
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += [update.tokens[0] for update, _ in await queue.take()]
    return numbers


def test_many_updates_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[list[list[int]], int]:
        loop, wake_ups = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def count(callback: Callable[[], None]) -> object:
            nonlocal wake_ups
            wake_ups += 1
            return wake(callback)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        inbox, queues = Inbox(loop), [UpdateQueue() for _ in range(64)]
        thread = threading.Thread(target=put_all, args=(inbox, queues, 4))
        thread.start()
        thread.join()  # the event loop is busy all the while
        return await asyncio.gather(*(take(queue, 4) for queue in queues)), wake_ups

    assert asyncio.run(main()) == ([[0, 1, 2, 3]] * 64, 1)


def test_no_update_is_left_behind_or_overtakes_another() -> None:
    async def main() -> list[list[int]]:
        inbox = Inbox(asyncio.get_running_loop())
        queues = [UpdateQueue() for _ in range(4)]
        threads = [
            threading.Thread(target=put_all, args=(inbox, [queue], 2000)) for queue in queues
        ]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(take(queue, 2000) for queue in queues))
        for thread in threads:
            thread.join()
        return found

    assert asyncio.run(main()) == [list(range(2000))] * 4


def test_a_closed_event_loop_keeps_no_updates() -> None:
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    loop.close()

    put_all(inbox, [UpdateQueue()], 100)

    assert not inbox.updates


def test_streams_of_an_event_loop_share_an_inbox_that_ends_with_them(scripted: Make) -> None:
    llm, _ = scripted()
    inboxes = get_session(llm).inboxes

    async def follow(counts: set[int]) -> None:
        async for _ in llm.astream("x", SamplingParams(max_tokens=50)):
            counts.add(len(inboxes))

    async def follow_three() -> set[int]:
        counts: set[int] = set()
        await asyncio.gather(*(follow(counts) for _ in range(3)))
        return counts

    assert asyncio.run(follow_three()) == {1}
    gc.collect()
    assert not inboxes


@st.composite
def sequences(draw: st.DrawFn) -> list[TimedUpdate]:
    """Updates of one to three requests in any order, each as an engine tells it from the start."""
    ids = ("a", "b", "c")[: draw(st.integers(1, 3))]
    scored = draw(st.booleans())
    told: dict[str, int] = {}
    ended: set[str] = set()
    updates: list[TimedUpdate] = []
    for number, name in enumerate(draw(st.lists(st.sampled_from(ids), max_size=12))):
        if name in ended:
            continue
        first, is_last = told.get(name, 0) == 0, draw(st.booleans()) and draw(st.booleans())
        count = draw(st.integers(0 if is_last and not first else 1, 3))
        tokens = tuple(range(told.get(name, 0), told.get(name, 0) + count))
        told[name] = told.get(name, 0) + count
        end: dict[str, Any] = {}
        if is_last:
            ended.add(name)
            end = {"finish_reason": "stop", "stop_token": 7, "preemptions": 2}
            if draw(st.booleans()):
                end = {"finish_reason": "error", "error": "it broke"}
        update = Update(
            id=name,
            tokens=tokens,
            logprobs=tuple(TokenLogprob(token, -1.0) for token in tokens)
            if scored and tokens
            else None,
            prompt_logprobs=(None,) if first and scored else None,
            cached_tokens=3 if first else None,
            queue_seconds=0.5 if first else None,
            **end,
        )
        updates.append((update, float(number)))
    return updates


@given(sequences(), st.data())
def test_joined_updates_say_the_same_and_first_tokens_stay_alone(
    updates: list[TimedUpdate], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(updates)))
    joined = [*join_updates(updates[:cut]), *join_updates(updates[cut:])]
    for part in (joined[: len(join_updates(updates[:cut]))], join_updates(updates[cut:])):
        assert [when for _, when in part] == sorted(when for _, when in part)
    for name in {update.id for update, _ in updates}:
        given_ = [each for each in updates if each[0].id == name]
        found = [each for each in joined if each[0].id == name]
        assert found[0] == given_[0]
        # The first, an error, and one on each side of the cut.
        assert len(found) <= 3 + (given_[-1][0].finish_reason == "error")
        assert sum((update.tokens for update, _ in found), ()) == sum(
            (update.tokens for update, _ in given_), ()
        )
        assert sum((update.logprobs or () for update, _ in found), ()) == sum(
            (update.logprobs or () for update, _ in given_), ()
        )
        (ours, our_time), (theirs, their_time) = found[-1], given_[-1]
        assert our_time == their_time
        assert ours.finish_reason == theirs.finish_reason
        assert ours.stop_token == theirs.stop_token
        assert ours.preemptions == theirs.preemptions
        if theirs.finish_reason == "error":
            assert ours == theirs


def test_a_task_that_stopped_waiting_misses_nothing() -> None:
    async def main() -> tuple[list[float], list[Any]]:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
        inbox, queue = Inbox(asyncio.get_running_loop()), UpdateQueue()
        waiting = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        waiting.cancel()
        put_all(inbox, [queue], 2)
        await asyncio.wait([waiting])
        async with asyncio.timeout(60):
            return [when for _, when in await queue.take()], complaints

    assert asyncio.run(main()) == ([0.0, 1.0], [])


def read_slowly(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """The pieces of an answer whose caller holds the event loop up at the first piece."""

    async def follow() -> list[RequestOutput]:
        pieces = []
        async for piece in llm.astream("hello", params):
            if not pieces:
                wait_for_end(llm)
            pieces.append(piece)
        return pieces

    return asyncio.run(follow())


def wait_for_end(llm: LLM) -> None:
    """Hold the event loop up until the engine has said all."""
    loop: Any = get_session(llm).loop
    end = time.monotonic() + 600
    while loop.rows:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_tokens_that_come_while_a_caller_is_busy_are_one_piece(scripted: Make) -> None:
    llm, _ = scripted()
    params = SamplingParams(max_tokens=40, logprobs=1)
    pieces = read_slowly(llm, params)
    (whole,) = llm.generate("hello", params)[0].outputs

    answers = [piece.outputs[0] for piece in pieces]
    # The first token, what came before it was read, what came while its caller was busy, and what
    # the engine's thread was about to pass on by then.
    assert len(answers[0].token_ids) == 1 and len(answers) <= 4
    assert [token for each in answers for token in each.token_ids] == whole.token_ids
    assert "".join(each.text for each in answers) == whole.text
    assert [table for each in answers for table in each.logprobs or ()] == whole.logprobs
    assert answers[-1].cumulative_logprob == whole.cumulative_logprob
    metrics = pieces[-1].metrics
    assert metrics.first_token is not None and metrics.end is not None
    assert metrics.first_token < metrics.end


def test_the_answer_that_ends_last_comes_last(scripted: Make) -> None:
    llm, _ = scripted(script=lambda request: [5] * (40 if request.id.endswith("-0") else 10))

    pieces = [piece.outputs[0] for piece in read_slowly(llm, SamplingParams(n=2, max_tokens=40))]

    counts = [sum(len(each.token_ids) for each in pieces if each.index == n) for n in range(2)]
    assert counts == [40, 10]
    assert [each.index for each in pieces if each.finish_reason is not None] == [1, 0]
    assert pieces[-1].index == 0


def test_a_caller_has_all_tokens_that_came_before_the_engine_died(scripted: Make) -> None:
    llm, loop = scripted(max_seq_len=4000)
    count = 0

    async def follow() -> None:
        nonlocal count
        async for piece in llm.astream("hello", SamplingParams(max_tokens=3000)):
            if not count:
                while len(loop.rows["0"].out) < 100:
                    time.sleep(0.001)
                loop.hold.set()
                rounds = loop.idle_rounds
                while loop.idle_rounds == rounds:  # what is under way is passed on
                    time.sleep(0.001)
                said.extend(loop.rows["0"].out)
                loop.die()
            count += len(piece.outputs[0].token_ids)

    said: list[int] = []
    with pytest.raises(EngineDied):
        asyncio.run(follow())
    assert count == len(said) >= 100


def test_no_token_behind_a_stop_string_is_in_a_piece(scripted: Make) -> None:
    llm, _ = scripted()
    (whole,) = llm.generate("hello", SamplingParams(max_tokens=40))[0].outputs
    middle = len(whole.text) // 2
    params = SamplingParams(max_tokens=40, stop=whole.text[middle : middle + 6])
    (right,) = llm.generate("hello", params)[0].outputs
    assert right.stop_reason is not None and len(right.token_ids) < 40

    answers = [piece.outputs[0] for piece in read_slowly(llm, params)]

    assert [token for each in answers for token in each.token_ids] == right.token_ids
    assert "".join(each.text for each in answers) == right.text
    assert (answers[-1].finish_reason, answers[-1].stop_reason) == ("stop", right.stop_reason)
