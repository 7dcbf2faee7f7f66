"""Tries grammars in helper processes with limits of time and memory."""

from __future__ import annotations

import json
import logging
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from queue import LifoQueue
from typing import IO, Any

from attrs import asdict

from headstock.errors import PluginBroken, shorten
from headstock.grammar.compiler import Trial
from headstock.logs import log_event
from headstock.spi import GrammarKind, Vocabulary

LOG = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Seconds that the process may take to start and read the vocabulary."""
TRIAL_BYTES = 1 << 30
"""Bytes of memory by which a process may grow while it tries grammars."""
NUM_TRIALS = 4
"""Grammars that are tried at once."""
LINE_BYTES = 1 << 20


class TrialPool:
    """Several trials, so that grammars which take their time leave room for others."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = trials
        # The one that was used last: its process runs, and others start only when they must.
        self.idle: LifoQueue[Trial] = LifoQueue()
        for trial in reversed(trials):
            self.idle.put(trial)

    def check(self, kind: GrammarKind, text: str) -> None:
        """Compile a grammar, after those before it have left a trial free.

        raises: ValueError with what is wrong; PluginBroken
        """
        trial = self.idle.get()
        try:
            trial.check(kind, text)
        finally:
            self.idle.put(trial)

    def close(self) -> None:
        """End all processes."""
        for trial in self.trials:
            trial.close()


class TrialProcess:
    """A process that compiles each grammar first. It starts with the first one.

    A grammar that takes too long, or too much memory, or that crashes the process, is refused; the
    next one gets a new process.

    plugin, options: as `--grammar` and `--opt` give them
    seconds: that a grammar may take
    """

    def __init__(
        self, plugin: str, options: Sequence[str], vocabulary: Vocabulary, seconds: float
    ) -> None:
        self.plugin = plugin
        self.start = {
            "plugin": plugin,
            "options": list(options),
            "vocabulary": asdict(vocabulary),
            "bytes": TRIAL_BYTES,
        }
        self.seconds = seconds
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def check(self, kind: GrammarKind, text: str) -> None:
        """Compile a grammar there.   raises: ValueError with what is wrong; PluginBroken"""
        # One at a time: a caller waits for those before it, which all have a time limit.
        with self.lock:
            process = self._ensure_process()
            end = time.monotonic() + self.seconds
            answer = self._ask(process, {"kind": kind.value, "text": text}, self.seconds)
            if answer is None:
                # A process that ends is seen to have ended a moment after its pipe closes.
                took_long = time.monotonic() >= end
                self._kill()
                LOG.warning(
                    log_event("a grammar was refused", kind=kind.value, took_long=took_long)
                )
                raise ValueError(
                    f"it takes more than {self.seconds:g} s to compile; make it simpler"
                    if took_long
                    else "it takes too much memory to compile, or crashes its compiler; make it "
                    "simpler"
                )
        if answer.get("broken"):
            raise PluginBroken(f"the grammar plugin {self.plugin!r}: {answer['broken']}")
        if answer.get("error"):
            raise ValueError(answer["error"])

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        """Return the process, started if needed.   raises: PluginBroken"""
        if self.process is not None and self.process.poll() is None:
            return self.process
        command = [sys.executable, "-m", "headstock.grammar.trial_process"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        answer = self._ask(self.process, self.start, START_SECONDS)
        if answer is None or answer.get("broken"):
            reason = "it ended or did not answer" if answer is None else answer["broken"]
            self._kill()
            raise PluginBroken(
                f"the grammar plugin {self.plugin!r} did not start in its own process: "
                f"{shorten(reason, 300)}"
            )
        return self.process

    def _ask(
        self, process: subprocess.Popen[bytes], question: dict[str, Any], seconds: float
    ) -> dict[str, Any] | None:
        """Return the answer to a question; None if it does not arrive in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + seconds
        try:
            _write_all(process.stdin, json.dumps(question).encode() + b"\n")
            line = _read_line(process.stdout, end)
        except OSError:
            return None
        try:
            answer = json.loads(line)
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _kill(self) -> None:
        """End the process, whatever it does."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def close(self) -> None:
        """End the process."""
        with self.lock:
            self._kill()


def _write_all(pipe: IO[bytes], data: bytes) -> None:
    """Write all of the data; the other end reads before it works, so it does not block for long.

    raises: OSError
    """
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _read_line(pipe: IO[bytes], end: float) -> bytes:
    """Read a line; empty if none arrives by `end`, in seconds of `time.monotonic`."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < LINE_BYTES:
            left = end - time.monotonic()
            if left <= 0 or not selector.select(left):
                return b""
            chunk = pipe.read(LINE_BYTES)
            if not chunk:
                return b""
            line += chunk
    return line
