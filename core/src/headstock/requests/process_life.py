"""What the end and the forks of a process mean for the engines in it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from headstock.errors import CannotRun, UsageError

_ENDING = (
    "Python is exiting and cannot start an engine; make the LLM in a thread that is not a daemon"
)


@contextlib.contextmanager
def hold_exit() -> Iterator[Callable[[], None]]:
    """The interpreter does not end before the block has.

    A daemon thread that loads a model is in C++ code most of the time, and one that is there while
    the interpreter ends aborts the process (SIGABRT). The result raises CannotRun once the
    interpreter waits, so that it need not wait for the whole start.
    raises: CannotRun in a daemon thread once the main thread has ended
    """
    # Or a thread that starts one engine after another would let no process end.
    if threading.current_thread().daemon and not threading.main_thread().is_alive():
        raise CannotRun(_ENDING)
    is_ending = False
    lock = threading.Lock()
    lock.acquire()

    def wait() -> None:
        nonlocal is_ending
        is_ending = True
        while True:
            try:
                with lock:
                    return
            except KeyboardInterrupt:  # the thread must have left torch
                continue

    def check() -> None:
        if is_ending:
            raise CannotRun(_ENDING)

    finalizer = weakref.finalize(lock, wait)
    try:
        yield check
    finally:
        # Released first: the interpreter may have begun to wait meanwhile.
        lock.release()
        finalizer.detach()


def check_process(process_id: int) -> None:
    """Raise UsageError in another process than that of the engine."""
    if os.getpid() != process_id:
        raise UsageError(
            f"this LLM belongs to process {process_id}, which forked this one; start processes "
            "with multiprocessing's 'spawn', or make no LLM before the fork"
        )


def check_can_start() -> None:
    """Raise CannotRun in a forked process where torch would hang."""
    import torch

    first = _find_first_process()
    # The threads of torch's pools are not forked, and it waits for them; nor can CUDA be forked.
    if first != os.getpid() and (torch.get_num_threads() > 1 or torch.cuda.is_available()):
        raise CannotRun(
            f"process {first} started an engine and forked this one, where torch would hang; start "
            "processes with multiprocessing's 'spawn', or make no LLM before the fork"
        )


@functools.cache
def _find_first_process() -> int:
    """The first process to ask among this one and those that it was forked from."""
    return os.getpid()


# The first finalizer registers with atexit what ends all of them. Were that an engine's, handlers
# that a script registered before it would find its engine closed.
weakref.finalize(check_process, bool)
