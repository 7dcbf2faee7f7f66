"""The process of a command: streams that can be written, and a clean end on signals."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from headstock.errors import UsageError, shorten

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""What the system says when a disk is full, a quota used up, a device broken or a file at its
limit.
"""

OWN_DEVICES = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""torch loads no other devices' backends, which headstock does not serve. `import torch` reads the
entry points of all distributions for them, and raises where one line of any is wrong.
"""
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""torch's CUDA allocator extends what it holds, instead of taking a new piece for each size that
fits no old one. With penalties and logprobs, which make tensors of another size in every step, it
held 0.96 GiB for 9.2 (one H200).
"""
RESEND_SECONDS = 0.02
"""How long after an interrupt was dropped it is sent again."""
ALLOCATOR = (*EXPANDABLE, "PYTORCH_CUDA_ALLOC_CONF")


class Terminated(BaseException):
    """SIGTERM arrived. The stack unwinds as after Ctrl-C, so that everything open is closed."""


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """SIGTERM raises Terminated in this block, and no Ctrl-C or SIGTERM is lost in it.

    A second SIGTERM ends the process.
    """
    # Only the main thread may set a handler, and one that an embedding program set is its own.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        # Restored first, so that a second SIGTERM ends a process that hangs while it closes.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    def resend(unraisable: sys.UnraisableHookArgs) -> None:
        """Send a signal again whose exception Python has just dropped."""
        if unraisable.exc_type is KeyboardInterrupt:
            number = signal.SIGINT
        elif unraisable.exc_type is Terminated:
            number = signal.SIGTERM
            signal.signal(number, terminate)
        else:
            report(unraisable)
            return
        timer = threading.Timer(RESEND_SECONDS, os.kill, [os.getpid(), number])
        timer.daemon = True
        timer.start()

    # What a handler raises is dropped where it arrives in a destructor, in a callback of the
    # garbage collector or of a C library. A signal sent at once would arrive there again.
    report = sys.unraisablehook
    sys.unraisablehook = resend
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = report


def prepare_torch(environment: MutableMapping[str, str]) -> None:
    """Have torch extend its device memory and serve headstock's devices alone.

    What the user set up stays as it is.   writes: environment
    """
    for name, value in OWN_DEVICES.items():
        environment.setdefault(name, value)
    if not any(name in environment for name in ALLOCATOR):
        environment.update(EXPANDABLE)


def pause_collections() -> None:
    """Collect no garbage until `resume_collections`.

    While torch is imported the collector looks 470 times at objects that live as long as the
    process: 0.26 s of the 3.4 s that a short run takes on a CPU.
    """
    gc.disable()


def resume_collections() -> None:
    """Collect garbage again, if that was paused, but never look at what lives now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def open_streams() -> None:
    """Open output that the caller closed on the null device, and escape what a terminal lacks."""
    # First of all: a file that is opened later could take the number of standard output, and would
    # get what libraries print.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - it lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def exit_at_once(code: int) -> NoReturn:
    """End the process with this code and free nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Not sys.exit: destructors would wait for a device that may hang.
    os._exit(code)


def drop_output() -> None:
    """Point standard output at the null device, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def reserve_output(wanted: bool = True) -> Iterator[TextIO]:
    """Standard output for the caller alone, where `wanted`.

    What plugins and libraries print in this block goes to standard error, in C code too.
    """
    stdout = sys.stdout
    if not wanted:
        yield stdout
        return
    with contextlib.redirect_stdout(sys.stderr):
        if _file_number(stdout) != 1 or _file_number(sys.stderr) is None:
            yield stdout  # a test's or a notebook's own stream
            return
        stdout.flush()
        number = os.dup(1)
        with open(number, "w", encoding=stdout.encoding, errors=stdout.errors) as output:
            os.dup2(sys.stderr.fileno(), 1)
            try:
                yield output
            finally:
                os.dup2(number, 1)


def _file_number(stream: TextIO) -> int | None:
    """The number of the file that the stream writes to, if it has one."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def check_distinct_files(files: Mapping[str, str | None]) -> None:
    """Raise UsageError when two of the paths are one file, which would be overwritten.

    `files` maps the name of a flag to its path.
    """
    first_names: dict[str, str] = {}
    for name, path in files.items():
        if path is None or (which := _identify_file(path)) is None:
            continue
        first = first_names.setdefault(which, name)
        if first != name:
            raise UsageError(
                f"{first} and {name} are both {shorten(path)}, which would be written over; name "
                "another file"
            )


def _identify_file(path: str) -> str | None:
    """What all links to a file share; None for a pipe or a device, which keeps nothing."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        # The file does not exist yet, or it will be refused when it is opened.
        return os.path.realpath(path)
    # Device and inode are the same through symbolic and hard links.
    return f"{status.st_dev}:{status.st_ino}" if stat.S_ISREG(status.st_mode) else None
