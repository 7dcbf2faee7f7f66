"""Turns typed at a terminal: keys in, turns out."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from headstock.cli.process import Terminated, handle_signals
from headstock.cli.turns import LineDropped, history_path, open_editor, open_history

CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"


def pasted(text: str) -> str:
    """What a terminal sends for a pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


@contextmanager
def editor(history: Path | None = None) -> Iterator[tuple[PipeInput, Callable[[], str]]]:
    """A keyboard, and what reads turns from it."""
    with create_pipe_input() as keyboard:
        yield keyboard, open_editor(history, input=keyboard, output=DummyOutput())


@pytest.mark.parametrize(
    ("keys", "turns"),
    [
        ("hello\r", ["hello"]),
        ("a\rb\r", ["a", "b"]),
        (pasted("one\ntwo\nthree\nfour") + "\r", ["one\ntwo\nthree\nfour"]),
        (pasted("one\r\ntwo\r") + "\r", ["one\ntwo\n"]),
        ("one" + ALT_ENTER + "two\r", ["one\ntwo"]),
        ("before " + pasted("x\ny") + " after\r", ["before x\ny after"]),
        ("日本\x7f語\r", ["日語"]),
    ],
)
def test_keys_make_turns(keys: str, turns: list[str]) -> None:
    with editor() as (keyboard, read):
        keyboard.send_text(keys)
        assert [read() for _ in turns] == turns


def test_ctrl_c_drops_the_line_and_says_whether_there_was_one() -> None:
    with editor() as (keyboard, read):
        for typed, is_empty in (("abc", False), ("", True), (pasted("a\nb"), False)):
            keyboard.send_text(typed + CTRL_C)
            with pytest.raises(LineDropped) as dropped:
                read()
            assert dropped.value.is_empty is is_empty
        keyboard.send_text("next\r")
        assert read() == "next"


def test_ctrl_d_on_an_empty_line_ends_the_input() -> None:
    with editor() as (keyboard, read):
        keyboard.send_text(CTRL_D)
        with pytest.raises(EOFError):
            read()


def recalled(keyboard: PipeInput, read: Callable[[], str]) -> str:
    """The turn that the arrow brings back; an editor reads its history while it waits for keys."""
    threading.Timer(1.0, keyboard.send_text, [UP + "\r"]).start()
    return read()


def test_turns_come_back_by_the_arrow_in_this_chat_and_in_the_next(tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    with editor(file) as (keyboard, read):
        keyboard.send_text("first\r" + pasted("two\nlines") + "\r")
        assert [read(), read()] == ["first", "two\nlines"]
        assert recalled(keyboard, read) == "two\nlines"
    assert (
        stat.S_IMODE(file.stat().st_mode) == 0o600
        and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    )
    with editor(file) as (keyboard, read):
        assert recalled(keyboard, read) == "two\nlines"


def test_without_a_file_turns_are_remembered_in_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with editor(None) as (keyboard, read):
        keyboard.send_text("first\r")
        assert [read(), recalled(keyboard, read)] == ["first", "first"]
    assert list(tmp_path.iterdir()) == []


def test_a_history_that_cannot_be_written_leaves_the_chat_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with editor(tmp_path / "file" / "history") as (keyboard, read):
        keyboard.send_text("first\r")
        assert [read(), recalled(keyboard, read)] == ["first", "first"]
    assert "the chat keeps no history: cannot write" in capsys.readouterr().err
    history = open_history(tmp_path / "history")
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()
    history.append_string("what cannot be stored")
    assert history.get_strings() == ["what cannot be stored"]


def test_the_history_lies_in_the_users_state_folder_and_can_be_moved_or_turned_off(
    tmp_path: Path,
) -> None:
    home = Path("~/.local/state/headstock/history").expanduser()
    assert history_path(None, {}) == history_path(None, {"XDG_STATE_HOME": "not/absolute"}) == home
    assert (
        history_path(None, {"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "headstock" / "history"
    )
    assert (
        history_path("off", {}) is None and history_path(None, {"HEADSTOCK_HISTORY": "off"}) is None
    )
    assert history_path("a", {"HEADSTOCK_HISTORY": "off"}) == Path("a")
    assert history_path("~/b", {}) == Path(os.path.expanduser("~/b"))


class OutputThatTerminates(DummyOutput):
    """A terminal that gets this process a SIGTERM when `armed` and drawn on."""

    armed = False

    def flush(self) -> None:
        if self.armed:
            self.armed = False
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_while_a_key_is_drawn_ends_the_editor() -> None:
    # Event loops log what a callback raises, and go on: drawing is such a callback.
    output = OutputThatTerminates()
    with create_pipe_input() as keyboard, handle_signals():
        before = signal.getsignal(signal.SIGTERM)
        read = open_editor(None, input=keyboard, output=output)

        def type_a_key() -> None:
            output.armed = True
            keyboard.send_text("a")

        threading.Timer(0.3, type_a_key).start()
        give_up = threading.Timer(20, keyboard.send_text, ("\r\r",))
        give_up.start()
        with pytest.raises(Terminated):
            read()
        give_up.cancel()
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_editor_leaves_sigterm_to_who_handles_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with editor() as (keyboard, read):
        keyboard.send_text("a\r")
        assert read() == "a"
    assert signal.getsignal(signal.SIGTERM) is before
