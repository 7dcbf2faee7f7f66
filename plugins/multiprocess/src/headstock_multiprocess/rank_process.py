"""The process of another rank than 0 on this machine.

Run as `python -m headstock_multiprocess.rank_process FD`. It ends when the other end of the socket
closes, also while torch is imported, so that no rank outlives rank 0.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headstock.errors import EngineDied
from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import Start, ToRank

_WATCH_MILLISECONDS = 100


def main(arguments: list[str]) -> int:
    """Follow rank 0 on the socket with the file descriptor ARGUMENTS[0]; return the exit code."""
    # Rank 0 decides when the others end. A terminal sends Ctrl-C to all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What is imported lives as long as the process: `follow` collects again.
    gc.disable()
    link: Link[ToRank] = Link(socket.socket(fileno=int(arguments[0])), ToRank)
    start = link.receive()
    if not isinstance(start, Start):
        return EngineDied.exit_code
    with ended_with(link.socket):
        from headstock_multiprocess.follower import run_follower
    return run_follower(start, link)


@contextmanager
def ended_with(sock: socket.socket) -> Iterator[None]:
    """In this block, the process ends at once when the other end of the socket does."""
    is_over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, 0)  # the end alone, not what can be read
        while not is_over.is_set():
            if poll.poll(_WATCH_MILLISECONDS) and not is_over.is_set():
                os._exit(EngineDied.exit_code)

    threading.Thread(target=watch, daemon=True, name="headstock-ranks").start()
    try:
        yield
    finally:
        is_over.set()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Rank 0 waits for this process: no destructor frees what the process's end frees.
    os._exit(code)
