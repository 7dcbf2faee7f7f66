"""A program that forks while it has an engine: what its children get, and that it goes on."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial

from torch.utils.data import DataLoader, Dataset

from headstock import LLM, SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hi"}]
SECONDS = 300
"""Ends a child that hangs."""


def say(what: str) -> None:
    """Print at once: two processes have this output."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def report(call: Callable[[], object]) -> None:
    """Say what a call in a child comes to."""
    try:
        call()
    except Exception as error:
        says_what_to_do = "'spawn', or make no LLM before the fork" in str(error)
        say(f"{type(error).__name__} {says_what_to_do}")


def fork(name: str, call: Callable[[], object]) -> None:
    """Call in a child that ends as a script does, and say how that ended."""
    say(f"{name}:")
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        report(call)
        sys.exit(0)
    say(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


class Answers(Dataset[str]):
    """Rows that an engine writes."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        return self.llm.generate("12 + 30 =", SHORT)[0].outputs[0].text


def main(recording: str) -> None:
    """Fork for each way to use the engine; it answers as before all the while."""
    warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
    llm = LLM("demo", num_pages=512, record=recording)
    wanted = llm.generate("12 + 30 =", SHORT)[0].outputs[0].text
    stream = llm.stream("Once", LONG)
    next(stream)
    # The child has what came before the fork, and waits for the rest.
    fork("a stream that runs", lambda: list(stream))

    async def generate() -> None:
        await llm.generate_async("x", SHORT)

    calls: dict[str, Callable[[], object]] = {
        "generate": partial(llm.generate, "x", SHORT),
        "chat": partial(llm.chat, CHAT, SHORT),
        "embed": partial(llm.embed, "x"),
        "stream": partial(llm.stream, "x", SHORT),
        "generate_async": lambda: asyncio.run(generate()),
        "reset_prefix_cache": llm.reset_prefix_cache,
        "with": llm.__enter__,
        "an engine of its own": partial(LLM, "demo"),
        "close": llm.close,
        "the tokenizer": lambda: say(str(len(llm.get_tokenizer()("12").input_ids) > 0)),
        "exit": partial(sys.exit, 7),
    }
    for name, call in calls.items():
        fork(name, call)
        assert llm.generate("12 + 30 =", SHORT)[0].outputs[0].text == wanted, name

    say("drop:")
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        del llm, stream, calls, call
        gc.collect()
        sys.exit(0)
    say(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    say("a process of multiprocessing:")
    process = multiprocessing.get_context("fork").Process(
        target=report, args=[calls["generate"]], daemon=True
    )
    process.start()
    process.join(SECONDS)
    say(f"{process.exitcode}")
    say("a worker of a DataLoader:")
    report(lambda: list(DataLoader(Answers(llm), num_workers=1, multiprocessing_context="fork")))

    say("the parent's stream:")
    say(f"{sum(len(piece.outputs[0].token_ids) for piece in stream)}")
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
