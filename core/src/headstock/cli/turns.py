"""Turns typed at a terminal: a line editor in which a pasted text is one turn, with a history."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from headstock.cli.notes import print_note
from headstock.cli.process import Terminated
from headstock.errors import shorten
from headstock.requests.terminal import can_draw

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import Output

HISTORY_VARIABLE = "HEADSTOCK_HISTORY"
OFF = "off"
PROMPT = "> "
CONTINUATION = "... "


class LineDropped(Exception):
    """Ctrl-C at the prompt; `is_empty` when there was nothing to drop."""

    def __init__(self, *, is_empty: bool) -> None:
        super().__init__()
        self.is_empty = is_empty


def history_path(flag: str | None, environ: Mapping[str, str]) -> Path | None:
    """The history file: the flag's, the variable's, or one in the user's state folder.

    None when the flag or the variable is `off`.
    """
    path = flag or environ.get(HISTORY_VARIABLE)
    if path == OFF:
        return None
    if path:
        return Path(os.path.expanduser(path))
    folder = environ.get("XDG_STATE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    state = (
        Path(folder) if Path(folder).is_absolute() else Path(os.path.expanduser("~/.local/state"))
    )
    return state / "headstock" / "history"


def open_reader(history: Path | None) -> Callable[[], str]:
    """A function that reads a turn from the terminal, with a line editor where one can be drawn.

    The editor draws on standard output, or else on standard error. The function raises EOFError at
    the end of input, and LineDropped.
    """
    drawn = next((stream for stream in (sys.stdout, sys.stderr) if can_draw(stream)), None)
    if drawn is None:
        return _read_plain
    output = _open_output(drawn)
    return _restore_after(open_editor(history, output=output), output)


def _restore_after(read: Callable[[], str], output: Output) -> Callable[[], str]:
    """`read`, with the terminal's modes restored when a signal interrupts the editor."""
    if sys.platform == "win32":
        return read
    import termios

    def read_turn() -> str:
        """What `read` gives."""
        modes = termios.tcgetattr(sys.stdin.fileno())
        try:
            return read()
        # By these two the editor ends in good order. Ctrl-C or SIGTERM in between leaves raw mode
        # on.
        except (EOFError, LineDropped):
            raise
        except BaseException:
            output.disable_bracketed_paste()
            output.flush()
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, modes)
            raise

    return read_turn


def _open_output(stream: TextIO) -> Output:
    """The terminal behind `stream`, which is never asked for the position of its cursor.

    Some terminals do not answer, and the chat would wait for them.
    """
    from prompt_toolkit.data_structures import Size
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output

    if sys.platform == "win32":
        return create_output(stdout=stream)

    def size() -> Size:
        """The terminal's size, or a usual one where it knows none."""
        terminal = os.get_terminal_size(stream.fileno())
        return Size(rows=terminal.lines or 24, columns=terminal.columns or 80)

    return Vt100_Output(stream, size, term=os.environ.get("TERM"), enable_cpr=False)


def _read_plain() -> str:
    """A line of standard input, without an editor.

    raises: EOFError, LineDropped
    """
    try:
        return input(PROMPT)
    except KeyboardInterrupt:
        raise LineDropped(is_empty=True) from None


def open_editor(
    history: Path | None, *, input: Input | None = None, output: Output | None = None
) -> Callable[[], str]:
    """A reader with an editor: Enter ends a turn, Alt-Enter begins a line, a paste is one turn."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        message=PROMPT,
        history=open_history(history),
        key_bindings=_bind_keys(),
        prompt_continuation=CONTINUATION,
        enable_suspend=True,
        input=input,
        output=output,
    )
    return partial(_read_until_terminated, session)


def _read_until_terminated(session: PromptSession[str]) -> str:
    """A turn; a SIGTERM that would raise Terminated ends the editor with it."""
    import asyncio

    handler = signal.getsignal(signal.SIGTERM)
    if sys.platform == "win32" or not callable(handler):
        return session.prompt()

    def terminate() -> None:
        """End the editor, unless it ends already."""
        if not session.app.is_done:
            session.app.exit(exception=Terminated())

    def handle_sigterm() -> None:
        """Have the editor's event loop receive the signal."""
        # Raised in a callback of the loop, Terminated would be logged and the loop would go on.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)

    try:
        return session.prompt(pre_run=handle_sigterm)
    finally:  # the loop restored the system's own handler when it was closed
        signal.signal(signal.SIGTERM, handler)


def _bind_keys() -> KeyBindings:
    """Ctrl-C drops the line, Alt-Enter begins another one in the same turn."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    # In the terminal's raw mode Ctrl-C is a key; the signal comes from other processes.
    @keys.add("c-c")
    @keys.add("<sigint>")
    def drop(event: KeyPressEvent) -> None:
        event.app.exit(exception=LineDropped(is_empty=not event.app.current_buffer.text))

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.app.current_buffer.insert_text("\n")

    return keys


def open_history(path: Path | None) -> History:
    """A history in a file that only its owner can read.

    In memory without a path, or when the file cannot be written.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class History(FileHistory):
        """A chat goes on when its history cannot be written, as on a full disk."""

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except (OSError, UnicodeError):
                return

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made here, because FileHistory would leave its mode to the umask.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or shorten(error)
        print_note(f"note: the chat keeps no history: cannot write {shorten(path)}: {reason}")
        return InMemoryHistory()
    return History(str(path))
