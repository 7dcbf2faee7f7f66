"""Chats in a terminal, over a scripted engine."""

from __future__ import annotations

import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headstock.cli import run as verb
from headstock.cli.chat_session import Chat, run_chat
from headstock.cli.turns import LineDropped
from headstock.errors import UsageError
from headstock.llm import LLM
from headstock.sampling_params import SamplingParams


def test_garbage_is_collected_again_once_an_engine_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headstock.requests.session.EngineSession", lambda config, start: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    gc.disable()
    try:
        verb.open_model(verb.resolve_flags(verb.make_parser().parse_args([]), {}), quiet=True)
        assert gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.feature("S10")
def test_a_chat_limits_graph_buckets_to_one_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        "headstock.requests.session.EngineSession", lambda config, start: seen.append(config)
    )
    for flags in ([], ["--cuda-graph-max-bs", "4"]):
        resolved = verb.resolve_flags(verb.make_parser().parse_args(flags), {})
        verb.open_model(resolved, quiet=True, alone=True)
    assert [config.cuda_graph_max_bs for config in seen] == [1, 4]


class Typing:
    """Reads typed lines; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = list(lines)

    def __call__(self) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


def test_a_chat_remembers_resets_and_saves(
    scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm: LLM
    llm, loop = scripted(
        script=lambda request: [*llm._session.tokenizer.encode("hello fox"), 0], max_seq_len=4096
    )
    file = tmp_path / "chat.json"
    typed = Typing("hi", "again", f"/save {file}", f"/save {file}", "/save", "/stats", "/nonsense",
    "", "/reset",
                   "anew", "/system be brief", "x", "/system", "y", "/help", "/exit",
                   "never")  # fmt: skip
    assert run_chat(llm._session, SamplingParams(), None, typed) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello fox\n" * 5
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello fox"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "hello fox"},
    ]
    assert json.loads(file.read_text()) == {"messages": talk}
    prompts = [
        llm._session.tokenizer.decode(request.prompt, skip_special_tokens=False)
        for request in loop.seen
    ]
    assert (
        prompts[1]
        == "<|im|>user: hi\n<|im|>assistant: hello fox\n<|im|>user: again\n<|im|>assistant: "
    )
    assert prompts[2] == "<|im|>user: anew\n<|im|>assistant: "
    assert prompts[3].startswith("<|im|>system: be brief\n<|im|>user: x\n")
    assert prompts[4] == "<|im|>user: y\n<|im|>assistant: "
    for said in ("saved 4 turns", "exists; choose another name", "needs the name of a file",
    "chat: 2 answers",
                 "no command /nonsense", "/reset        clear"):  # fmt: skip
        assert said in captured.err
    assert typed.lines == ["never"]


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    scripted: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, loop = scripted(max_seq_len=1 << 14)
    write, written = sys.stdout.write, []

    def press_ctrl_c(text: str) -> int:
        """Write `text`; the tenth time Ctrl-C comes."""
        written.append(text)
        if len(written) == 10:
            signal.raise_signal(signal.SIGINT)
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", press_ctrl_c)
    code = run_chat(llm._session, SamplingParams(max_tokens=None), None, Typing("hi", "/stats"))
    captured = capsys.readouterr()
    assert code == 0 and "[stopped]" in captured.out and "ended by Ctrl-C" in captured.err
    assert "- tokens/s" not in captured.err
    assert loop.aborted == ["0"]


def test_ctrl_c_at_the_prompt_drops_the_line_and_on_the_next_empty_one_leaves(
    scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, _ = scripted(
        script=lambda request: [*llm._session.tokenizer.encode("fox"), 0], max_seq_len=4096
    )
    empty, full = LineDropped(is_empty=True), LineDropped(is_empty=False)
    typed = Typing(empty, "hi", full, full, empty, "never")
    assert run_chat(llm._session, SamplingParams(), None, typed) == 0
    captured = capsys.readouterr()
    assert captured.out == "fox\n" and typed.lines == ["never"]
    assert captured.err.splitlines() == [
        "/help lists the commands; /exit leaves",
        *["Ctrl-C again leaves, as do Ctrl-D and /exit"] * 3,
        "chat ended: 1 answer, 3 tokens",
    ]


def test_ctrl_c_before_an_answer_begins_forgets_the_turn(
    scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, loop = scripted(max_seq_len=4096)
    chat = Chat(llm._session, SamplingParams(max_tokens=3), None)

    def interrupted(messages: object) -> None:
        raise KeyboardInterrupt

    llm._session.input_processor.render_chat = interrupted
    chat.answer_turn("hi")
    assert chat.turns == [] and loop.seen == []
    assert capsys.readouterr().err == "stopped; the turn is dropped\n"


def test_a_text_of_several_lines_is_one_turn_even_behind_a_slash(scripted: Any) -> None:
    llm, loop = scripted(script=lambda request: [0], max_seq_len=4096)
    assert (
        run_chat(
            llm._session,
            SamplingParams(),
            None,
            Typing("a\nb\nc", "/etc\n/usr", "/system be\nbrief", "x"),
        )
        == 0
    )
    prompts = [
        llm._session.tokenizer.decode(request.prompt, skip_special_tokens=False)
        for request in loop.seen
    ]
    assert prompts[0] == "<|im|>user: a\nb\nc\n<|im|>assistant: "
    assert prompts[1].endswith("<|im|>user: /etc\n/usr\n<|im|>assistant: ")
    assert prompts[2] == "<|im|>system: be\nbrief\n<|im|>user: x\n<|im|>assistant: "


def test_a_chat_that_grew_too_long_says_so_and_goes_on(
    scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, _ = scripted(max_seq_len=64)
    assert (
        run_chat(llm._session, SamplingParams(max_tokens=2), None, Typing("hello " * 60, "hi")) == 0
    )
    captured = capsys.readouterr()
    assert "but sequences may have 64 here" in captured.err and len(captured.out.splitlines()) >= 1


def test_a_chat_needs_a_template(scripted: Any, byte_fallback: Path) -> None:
    llm, _ = scripted(directory=byte_fallback)
    with pytest.raises(UsageError, match="no chat template"):
        run_chat(llm._session, SamplingParams(), None, Typing("hi"))


def test_a_full_context_drops_the_oldest_turns_and_says_so(
    scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, loop = scripted(
        script=lambda request: [*llm._session.tokenizer.encode("hello fox"), 0], max_seq_len=200
    )
    turns = [f"turn {number} {'x' * 20}" for number in range(30)]
    file = tmp_path / "chat.json"
    typed = Typing(*turns, f"/save {file}", "/reset", turns[0])

    assert run_chat(llm._session, SamplingParams(max_tokens=None), "be brief", typed) == 0

    captured = capsys.readouterr()
    assert captured.out == "hello fox\n" * 31
    prompts = [
        llm._session.tokenizer.decode(request.prompt, skip_special_tokens=False)
        for request in loop.seen
    ]
    assert turns[0] in prompts[1] and turns[0] not in prompts[-2]
    for prompt, turn, request in zip(prompts, [*turns, turns[0]], loop.seen, strict=True):
        assert prompt.startswith("<|im|>system: be brief\n<|im|>user: turn ")
        assert prompt.endswith(f"<|im|>user: {turn}\n<|im|>assistant: ")
        assert len(request.prompt) <= 150  # a quarter is left for the answer
    notes = [line for line in captured.err.splitlines() if "no longer sees" in line]
    assert notes[0] == (
        "the context of 200 tokens is full: the model no longer sees the 2 oldest turns; /reset "
        "starts over"
    )
    assert len(notes) > 5 and prompts[-1].count("user") == 1
    # What the model no longer sees was said all the same.
    assert len(json.loads(file.read_text())["messages"]) == 61


def test_a_turn_that_alone_does_not_fit_drops_no_other(
    scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, loop = scripted(
        script=lambda request: [*llm._session.tokenizer.encode("hello fox"), 0], max_seq_len=200
    )
    typed = Typing("first", "x" * 300, "second", "x" * 100_000, "third")

    assert run_chat(llm._session, SamplingParams(max_tokens=None), None, typed) == 0

    captured = capsys.readouterr()
    assert captured.out == "hello fox\n" * 3
    assert "no longer sees" not in captured.err and captured.err.count("/reset starts over") == 2
    last = llm._session.tokenizer.decode(loop.seen[-1].prompt, skip_special_tokens=False)
    assert "first" in last and "second" in last and "xxx" not in last


def test_a_cut_answer_says_by_what(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = scripted(script=lambda request: [5] * 4096, max_seq_len=200)
    run_chat(llm._session, SamplingParams(max_tokens=9), None, Typing("hi"))
    assert "the answer was cut after 9 tokens (--max-tokens)" in capsys.readouterr().err

    run_chat(llm._session, llm._session.default_chat_params, None, Typing("hi"))
    assert "the answer was cut: it fills the context of 200 tokens" in capsys.readouterr().err
