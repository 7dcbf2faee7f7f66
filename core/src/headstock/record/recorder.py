"""What a running engine remembers of its schedule, and writes when asked or when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headstock.errors import describe_error, shorten
from headstock.logs import log_event
from headstock.record.block import BlockWriter
from headstock.record.file import FIRST, opened, write_all, write_end, write_start, write_steps
from headstock.record.moment import Noted
from headstock.record.names import PageNames
from headstock.record.steps import put_step
from headstock.scheduler import Event, Limits, Plan, RequestState, State

LOG = logging.getLogger(__name__)

REMEMBERED = 256
"""Steps that a crash report holds."""
MOST_REPORTS = 4
"""Crash reports that one engine writes at most: a step that fails may fail again."""
MOST_KEPT = 10
"""Crash reports of this user that stay in the temporary folder."""
PREFIX, SUFFIX = "headstock-crash-", ".recording"
PAUSE = 0.25
"""Seconds between two writes to the file."""
BLOCK = 256
"""Steps in a block at most."""


class Recorder:
    """Keeps the last steps always, and all of them in a file when there is a `path`.

    `step` only notes references; a thread of its own names, packs and writes them, a quarter of a
    second later at most.
    `prompts`: tokens are written as they are. raises: ModelError when the file cannot be written
    """

    def __init__(
        self,
        header: Mapping[str, Any],
        limits: Limits,
        path: str | None = None,
        *,
        prompts: bool = False,
    ) -> None:
        self.header = {**header, "tokens": "ids" if prompts else "page names", "first": 0}
        self.limits = limits
        self.prompts = prompts
        self.ring: deque[Noted] = deque(maxlen=REMEMBERED)
        self.count = 0
        self.reports = 0
        self.writer = None if path is None else Writer(path, self.header, self.names())

    def names(self) -> PageNames | None:
        """New names for tokens; None when they are recorded as they are."""
        return None if self.prompts else PageNames(self.limits, secrets.token_bytes(32))

    def step(self, events: Sequence[Event], state: State, plan: Plan) -> None:
        """Remember what the scheduler was told and what it planned; `state` is the one that came
        with the plan.
        """
        joined: tuple[RequestState, ...] = ()
        if len(plan.new_row_ids):
            joined = tuple(
                [
                    entry
                    for row in plan.new_row_ids.tolist()
                    if (entry := state.requests_by_row[row]) is not None
                ]
            )
        self.note(Noted(time.perf_counter_ns(), events, plan, joined))

    def note(self, noted: Noted) -> None:
        """Remember a step."""
        self.count += 1
        self.ring.append(noted)
        if self.writer is not None:
            self.writer.pending.append(noted)

    def died(self, events: Sequence[Event], error: BaseException) -> str:
        """Remember the step that raised, and write down what is remembered: what to tell the user
        of it.
        """
        self.note(Noted(time.perf_counter_ns(), events, None, error=describe_error(error)))
        return self.report()

    def report(self) -> str:
        """Write down what is remembered: what to tell the user of it."""
        if self.writer is not None and self.writer.file is not None:
            self.writer.write()
            return f"the recording {self.writer.path} shows it: headstock replay {self.writer.path}"
        if self.reports >= MOST_REPORTS:
            return "the earlier recordings show the like"
        self.reports += 1
        try:
            handle, path = tempfile.mkstemp(prefix=PREFIX, suffix=SUFFIX)
            with os.fdopen(handle, "wb") as file:
                first = {"first": self.count - len(self.ring)}
                write_all(file, self.header | first, list(self.ring), self.names())
            remove_old_reports(Path(path).parent)
        except Exception as error:  # the failure that is being reported matters more
            return f"no recording could be written: {shorten(error)}"
        steps = "step is" if len(self.ring) == 1 else f"{len(self.ring)} steps are"
        return f"the last {steps} in {path}: headstock replay {path}"

    def close(self) -> None:
        """Write what is left to the file and end it."""
        if self.writer is not None:
            self.writer.close()


def remove_old_reports(folder: Path) -> None:
    """Delete all but the newest crash reports of this user in the folder.

    Other files stay, whatever their names: a report is a regular file that begins as recordings do.
    """
    reports = [path for path in folder.glob(f"{PREFIX}*{SUFFIX}") if is_report(path)]
    for path in sorted(reports, key=lambda path: path.lstat().st_mtime_ns)[:-MOST_KEPT]:
        with contextlib.suppress(OSError):  # another engine removes it too
            path.unlink()


def is_report(path: Path) -> bool:
    """Whether the file is a crash report that this user's engines wrote."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or (
            hasattr(os, "getuid") and facts.st_uid != os.getuid()
        ):
            return False
        with path.open("rb") as file:
            return file.read(len(FIRST)) == FIRST
    except OSError:
        return False


class Writer:
    """A thread that writes what is appended to `pending`."""

    def __init__(self, path: str, header: Mapping[str, Any], names: PageNames | None) -> None:
        self.path = path
        self.names = names
        self.pending: deque[Noted] = deque()
        self.file: BinaryIO | None = opened(path)
        self.lock = threading.Lock()
        # released at the end; Ctrl-C cannot leave it half set, as it can an Event
        self.bell = threading.Lock()
        self.bell.acquire()
        write_start(self.file, header)
        self.thread = threading.Thread(target=self.run, name="headstock-recorder", daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Write now and then until the end, then what is left and the end mark."""
        while not self.bell.acquire(timeout=PAUSE):
            self.write()
        self.write(last=True)

    def write(self, *, last: bool = False) -> None:
        """Write all that is pending, and the `last` time the end mark; a file that fails is given
        up, and logged.
        """
        with self.lock:
            try:
                while self.pending and self.file is not None:
                    self.write_block(self.file)
                if last and self.file is not None:
                    write_end(self.file)
                    self.give_up()
            except Exception as error:  # whatever it is, requests are served on
                LOG.error(log_event("recording stopped", file=self.path), exc_info=error)
                self.give_up()

    def write_block(self, file: BinaryIO) -> None:
        """Write the oldest pending steps."""
        block = BlockWriter()
        count = 0
        while self.pending and count < BLOCK:
            put_step(block, self.pending.popleft(), self.names)
            count += 1
            # lets the engine's thread go on at once, not at the interpreter's next switch (5 ms)
            time.sleep(0)
        write_steps(file, block, count)
        file.flush()

    def give_up(self) -> None:
        """Write nothing more, and let nothing pile up."""
        self.pending = deque(maxlen=0)
        file, self.file = self.file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                LOG.debug(log_event("recording not closed", file=self.path))

    def close(self) -> None:
        """Have the thread end the file, and wait for it."""
        with contextlib.suppress(RuntimeError):  # closed before
            self.bell.release()
        self.thread.join()
        self.write(last=True)  # nothing is left, unless Ctrl-C broke an earlier `join` off
