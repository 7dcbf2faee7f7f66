"""How updates reach the tasks of an event loop: all of them, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headstock import LLM, SamplingParams
from headstock.llm import get_session
from headstock.outputs import Update
from headstock.requests.client import Inbox, TimedUpdate

Make = Callable[..., tuple[LLM, Any]]


def put_all(inbox: Inbox, queues: Iterable[asyncio.Queue[TimedUpdate]], count: int) -> None:
    """Put the updates 0, 1, ... into each queue, by turns."""
    queues = list(queues)
    for number in range(count):
        for queue in queues:
            inbox.put(queue, (Update(id="", tokens=(number,)), float(number)))


async def take(queue: asyncio.Queue[TimedUpdate], count: int) -> list[int]:
    """The numbers of so many updates."""
    return [(await queue.get())[0].tokens[0] for _ in range(count)]


def test_many_updates_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[list[list[int]], int]:
        loop, wake_ups = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def count(callback: Callable[[], None]) -> object:
            nonlocal wake_ups
            wake_ups += 1
            return wake(callback)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        inbox, queues = Inbox(loop), [asyncio.Queue[TimedUpdate]() for _ in range(64)]
        thread = threading.Thread(target=put_all, args=(inbox, queues, 4))
        thread.start()
        thread.join()  # the event loop is busy all the while
        return await asyncio.gather(*(take(queue, 4) for queue in queues)), wake_ups

    assert asyncio.run(main()) == ([[0, 1, 2, 3]] * 64, 1)


def test_no_update_is_left_behind_or_overtakes_another() -> None:
    async def main() -> list[list[int]]:
        inbox = Inbox(asyncio.get_running_loop())
        queues = [asyncio.Queue[TimedUpdate]() for _ in range(4)]
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

    put_all(inbox, [asyncio.Queue()], 100)

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
