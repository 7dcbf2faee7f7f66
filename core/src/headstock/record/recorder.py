"""Recording of a running engine: the last steps in memory, all of them in a file on request."""

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
from headstock.record.anonymize import TokenAnonymizer
from headstock.record.block import BlockWriter
from headstock.record.file import (
    FIRST,
    open_for_writing,
    write_block,
    write_end_mark,
    write_header,
    write_recording,
)
from headstock.record.recorded_step import PendingRecord
from headstock.record.step_codec import write_step
from headstock.scheduler import Event, Limits, Plan, RequestState, State

LOG = logging.getLogger(__name__)

NUM_REMEMBERED = 256
"""Steps that the engine keeps in memory, and that a crash recording holds."""
MAX_CRASH_RECORDINGS = 4
"""Most crash recordings of one engine: a step that fails may fail again."""
MAX_KEPT = 10
"""Most crash recordings of a user in the temporary folder."""
PREFIX, SUFFIX = "headstock-crash-", ".recording"
WRITE_SECONDS = 0.25
"""Seconds between two writes to the file."""
MAX_BLOCK_STEPS = 256
"""Most steps of a block, which is what a reader decodes at once."""


class Recorder:
    """Keeps the last steps in memory, and writes all of them when there is a `path`.

    `prompts`: tokens are written as they are.
    raises: ModelError when the file cannot be written
    """

    # It is always on: a failure that comes unexpected is the one to replay. So a step may cost the
    # engine a few microseconds only. It stores references, and a thread of the writer anonymizes,
    # encodes and compresses them while the device works.

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
        self.recent: deque[PendingRecord] = deque(maxlen=NUM_REMEMBERED)
        self.num_steps = 0
        self.num_crash_recordings = 0
        self.writer = (
            None if path is None else RecordingWriter(path, self.header, self.make_anonymizer())
        )

    def make_anonymizer(self) -> TokenAnonymizer | None:
        """Return an anonymizer; None when tokens are recorded as they are."""
        # The key is drawn anew for each file: hashes of two recordings cannot be compared.
        return None if self.prompts else TokenAnonymizer(self.limits, secrets.token_bytes(32))

    def record_step(self, events: Sequence[Event], state: State, plan: Plan) -> None:
        """Record a step: its events, its plan and the state that came with the plan."""
        admitted: tuple[RequestState, ...] = ()
        if len(plan.new_row_ids):
            admitted = tuple(
                [
                    entry
                    for row in plan.new_row_ids.tolist()
                    if (entry := state.requests_by_row[row]) is not None
                ]
            )
        self.add_record(PendingRecord(time.perf_counter_ns(), events, plan, admitted))

    def add_record(self, pending: PendingRecord) -> None:
        """Keep a step, and queue it for the file."""
        self.num_steps += 1
        self.recent.append(pending)
        if self.writer is not None:
            self.writer.pending.append(pending)

    def record_failure(self, events: Sequence[Event], error: BaseException) -> str:
        """Record the step that raised; return where the recording is, for the error message."""
        self.add_record(
            PendingRecord(time.perf_counter_ns(), events, None, error=describe_error(error))
        )
        return self.write_crash_recording()

    def write_crash_recording(self) -> str:
        """Write the kept steps to a file; return where it is, for the error message.

        With a `path` the recording itself has them.
        """
        if self.writer is not None and self.writer.file is not None:
            self.writer.write_pending()
            return f"the recording shows it: headstock replay {self.writer.path}"
        if self.num_crash_recordings >= MAX_CRASH_RECORDINGS:
            return "the earlier recordings show the like"
        self.num_crash_recordings += 1
        try:
            # readable by its user alone: request ids are written as they are
            handle, path = tempfile.mkstemp(prefix=PREFIX, suffix=SUFFIX)
            with os.fdopen(handle, "wb") as file:
                first = {"first": self.num_steps - len(self.recent)}
                write_recording(
                    file, self.header | first, list(self.recent), self.make_anonymizer()
                )
            _remove_old_crash_recordings(Path(path).parent)
        except Exception as error:  # the failure that is being reported matters more
            return f"no recording could be written: {shorten(error)}"
        steps = "step" if len(self.recent) == 1 else f"{len(self.recent)} steps"
        return f"the last {steps}: headstock replay {path}"

    def close(self) -> None:
        """Write the remaining steps and end the file."""
        if self.writer is not None:
            self.writer.close()


def _remove_old_crash_recordings(folder: Path) -> None:
    """Delete all but the newest crash recordings of this user in the folder.

    Other files stay, whatever their names.
    """
    crash_recordings = [
        path for path in folder.glob(f"{PREFIX}*{SUFFIX}") if _is_crash_recording(path)
    ]
    for path in sorted(crash_recordings, key=lambda path: path.lstat().st_mtime_ns)[:-MAX_KEPT]:
        with contextlib.suppress(OSError):  # another engine removes it too
            path.unlink()


def _is_crash_recording(path: Path) -> bool:
    """Whether the file is a crash recording that an engine of this user wrote."""
    try:
        # The folder is everyone's: not a link, not another user's file, and a recording inside.
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or (
            hasattr(os, "getuid") and facts.st_uid != os.getuid()
        ):
            return False
        with path.open("rb") as file:
            return file.read(len(FIRST)) == FIRST
    except OSError:
        return False


class RecordingWriter:
    """A thread that writes the steps that are appended to `pending`."""

    def __init__(
        self, path: str, header: Mapping[str, Any], anonymizer: TokenAnonymizer | None
    ) -> None:
        self.path = path
        self.anonymizer = anonymizer
        self.pending: deque[PendingRecord] = deque()
        self.file: BinaryIO | None = open_for_writing(path)
        self.lock = threading.Lock()
        # `close` releases it. Ctrl-C cannot leave a lock half set, as it can a threading.Event.
        self.stop_lock = threading.Lock()
        self.stop_lock.acquire()
        write_header(self.file, header)
        self.thread = threading.Thread(target=self._run, name="headstock-recorder", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Write every quarter of a second; at the end the remaining steps and the end mark."""
        while not self.stop_lock.acquire(timeout=WRITE_SECONDS):
            self.write_pending()
        self.write_pending(last=True)

    def write_pending(self, *, last: bool = False) -> None:
        """Write all pending steps, and the end mark if it is the `last` time.

        A file that fails is logged and closed.
        """
        with self.lock:
            try:
                while self.pending and self.file is not None:
                    self._write_block(self.file)
                if last and self.file is not None:
                    write_end_mark(self.file)
                    self._stop_writing()
            # A full disk or a fault of the encoder ends the recording, never the engine.
            except Exception as error:
                LOG.error(log_event("recording stopped", file=self.path), exc_info=error)
                self._stop_writing()

    def _write_block(self, file: BinaryIO) -> None:
        """Write the oldest pending steps."""
        block = BlockWriter()
        count = 0
        while self.pending and count < MAX_BLOCK_STEPS:
            write_step(block, self.pending.popleft(), self.anonymizer)
            count += 1
            # Lets the engine's thread go on at once, not at the interpreter's next switch (5 ms).
            time.sleep(0)
        write_block(file, block, count)
        file.flush()  # a killed process loses a quarter of a second, not the file's buffer

    def _stop_writing(self) -> None:
        """Close the file, and drop steps that still come."""
        self.pending = deque(maxlen=0)
        file, self.file = self.file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                LOG.debug(log_event("recording not closed", file=self.path))

    def close(self) -> None:
        """Have the thread end the file, and wait for the thread."""
        with contextlib.suppress(RuntimeError):  # closed before
            self.stop_lock.release()
        self.thread.join()
        self.write_pending(last=True)  # nothing is left, unless Ctrl-C broke an earlier `join` off
