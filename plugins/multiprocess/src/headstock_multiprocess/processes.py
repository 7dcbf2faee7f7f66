"""The processes of other ranks, as rank 0 sees them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod

from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import FromRank

_END_SECONDS = 2.0
"""How long a process that has closed its connection may take to end."""


class RankProcess(ABC):
    """The process of another rank; its text says which one it is."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait for the process to end, for so many seconds at most."""

    @abstractmethod
    def describe_end(self) -> str:
        """Say how the process has ended."""


class LocalProcess(RankProcess):
    """A process that rank 0 has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __str__(self) -> str:
        return f"process {self.process.pid}"

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, which is killed after these seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def describe_end(self) -> str:
        """Say how the process has ended."""
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class RemoteProcess(RankProcess):
    """A process that something else has started, maybe on another machine."""

    def __init__(self, link: Link[FromRank]) -> None:
        self.link = link
        self.place = link.describe_peer()

    def __str__(self) -> str:
        return f"at {self.place}"

    def kill(self) -> None:
        """Close the connection, which has the process end by itself."""
        self.link.close()

    def wait(self, seconds: float) -> None:
        """Its end cannot be waited for."""

    def describe_end(self) -> str:
        """Say how the process has ended."""
        return "closed its connection"


def start_process() -> tuple[LocalProcess, Link[FromRank]]:
    """Start the process of a rank on this machine, and connect to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "headstock_multiprocess.rank_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # What a plugin prints must not get between the lines of an answer.
            stdout=2,
        )
    return LocalProcess(process), Link(ours, FromRank)
