"""`headstock run` over a scripted engine: inputs, forms of output, ends."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstock.cli import run as verb
from headstock.text.tokenizer import Tokenizer

from .running import Run, hello


def test_one_prompt_prints_its_text_alone_and_a_summary_on_standard_error(run: Run) -> None:
    code, out, err = run("--prompt", "hello fox", script=hello)
    assert (code, out) == (0, "hello fox\n")
    assert "model: scripted" in err and "ended by stop" in err
    assert run("--prompt", "hello fox", "--quiet", script=hello) == (0, "hello fox\n", "")


def test_standard_input_is_one_prompt_without_its_last_line_break(run: Run) -> None:
    assert run("--quiet", stdin=b"two\nlines\n", script=hello)[1] == "two\nlines\n"


@pytest.mark.parametrize(
    ("stdin", "code", "said"), [(b"", 2, "no prompt: give --prompt"), (b"\xff", 6, "as UTF-8")]
)
def test_empty_or_unreadable_standard_input_is_one_line(
    run: Run, stdin: bytes, code: int, said: str
) -> None:
    found, out, err = run(stdin=stdin)
    assert (found, out) == (code, "") and said in err and len(err.splitlines()) == 1


def test_several_prompts_come_in_order_under_headings(run: Run) -> None:
    code, out, _ = run("-p", "hello", "-p", "fox", script=hello)
    assert (code, out) == (0, "==> 1: hello <==\nhello\n\n==> 2: fox <==\nfox\n\n")


def test_json_lines_hold_tokens_times_and_reasons(run: Run, tokenizer: Tokenizer) -> None:
    code, out, _ = run("-p", "hello", "-p", "fox", "--json", script=hello)
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0
    assert (first["prompt"], first["text"], second["text"]) == ("hello", "hello", "fox")
    assert first["token_ids"] == [*tokenizer.encode("hello"), 0]
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", None)
    assert first["usage"]["completion_tokens"] == first["usage"]["prompt_tokens"] + 1
    assert 0 <= first["timings"]["ttft"] <= first["timings"]["total"]
    assert first["timings"]["tokens_per_second"] > 0


@pytest.mark.feature("T6")
def test_the_summaries_and_json_count_preemptions_and_failures(run: Run) -> None:
    code, out, err = run("-p", "hello", "-p", "", "-p", "fox", "--json", script=hello, preempted=2)
    assert code == 1 and [json.loads(line).get("preemptions") for line in out.splitlines()] == [
        None,
        2,
        2,
    ]
    assert re.search(
        r"^3 prompts, 1 failed; \d+ tokens in [\d.]+ s, [\d.]+ tokens/s, 4 preemptions$",
        err,
        re.MULTILINE,
    )
    assert run("-p", "hello", script=hello, preempted=2)[2].endswith(
        ", ended by stop, preempted 2 times\n"
    )
    assert run("-p", "hello", script=hello)[2].endswith(", ended by stop\n")
    code, out, err = run("-p", "a", "-p", "b", script=hello, refuse={"0"})
    assert code == 1 and "2 prompts, 1 failed; " in err and "preemption" not in err


def test_a_cut_of_the_max_tokens_that_were_asked_for_is_said_once(run: Run, tmp_path: Path) -> None:
    def notes(*arguments: str) -> list[str]:
        _, out, err = run(*arguments, "--quiet", max_seq_len=16)
        assert out
        return err.splitlines()

    said = "note: --prompt aaaa: max_tokens is cut from 50 to 12"
    assert notes("-p", "aaaa", "--max-tokens", "50") == [
        f"{said}, the room beside the prompt in sequences of up to 16 tokens"
    ]
    assert notes("-p", "aaaa", "-p", "b", "-p", "c", "--max-tokens", "50") == [
        f"{said} (and so for 2 more), the room beside the prompt in sequences of up to 16 tokens"
    ]
    # 100 is nobody's wish
    assert notes("-p", "aaaa") == notes("-p", "aaaa", "--max-tokens", "12") == []
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "aaaa", "max_tokens": 13}')
    _, out, err = run("--input", str(file), "--json", "--quiet", max_seq_len=16)
    answer = json.loads(out)
    assert "prompts.jsonl:1: max_tokens is cut from 13 to 12" in err
    assert (answer["max_tokens"], len(answer["token_ids"]), answer["finish_reason"]) == (
        12,
        12,
        "length",
    )


def test_chat_and_system_go_through_the_template(run: Run) -> None:
    _, out, _ = run("-p", "fox", "--system", "be brief", "--json", script=hello)
    assert json.loads(out)["prompt"] == "<|im|>system: be brief\n<|im|>user: fox\n<|im|>assistant: "
    _, out, _ = run("-p", "fox", "--chat", "--json", script=hello)
    assert json.loads(out)["prompt"] == "<|im|>user: fox\n<|im|>assistant: "


def test_sampling_flags_reach_the_request_and_a_line_s_own_win(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "a", "max_tokens": 2}\n')
    _, out, _ = run("--input", str(file), "--max-tokens", "5", "--json")
    assert [len(json.loads(line)["token_ids"]) for line in out.splitlines()] == [5, 2]


def test_quiet_draws_no_bar_while_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(config: Any, start: Any) -> SimpleNamespace:
        start.keywords["on_progress"]("weights", 5, 10)
        return SimpleNamespace(list_summary=lambda verbose: ["model: none"])

    monkeypatch.setattr("headstock.requests.session.EngineSession", load)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    resolved = verb.resolve_flags(verb.make_parser().parse_args([]), {})
    verb.open_model(resolved, quiet=True)
    assert capsys.readouterr() == ("", "")
    verb.open_model(resolved, quiet=False)
    assert "weights" in capsys.readouterr().err


def test_an_interrupt_exits_130_and_closes_the_engine(
    run: Run, scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    code, _, err = run("-p", "a", "--max-tokens", "1000000", max_seq_len=1 << 14)
    assert code == 130 and "Traceback" not in err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, headstock.cli.main as m; code = m.main(['run', '--help']);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--prompt" in done.stdout and "--attn" in done.stdout


def test_a_dash_reads_json_lines_from_standard_input(run: Run) -> None:
    lines = (
        b'{"prompt": "hello", "max_tokens": 1, "ignore_eos": '
        b'true}\n\n{bad\n{"prompt_token_ids": [9, 8]}\n'
    )
    code, out, err = run(
        "--input", "-", "--json", "--quiet", "-p", "fox", stdin=lines, script=hello
    )
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and err.startswith(
        "headstock: standard input:3: not valid JSON: Expecting property name"
    )
    assert [(entry["where"], entry["request"]) for entry in found if "text" in entry] == [
        ("--prompt fox", 1),
        ("standard input:1", 2),
        ("standard input:4", 4),
    ]
    assert len(found[2]["token_ids"]) == 1


def test_a_dash_with_nothing_behind_it_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        "headstock: standard input holds no prompts; give one JSON object a line, such as "
        '{"prompt": "Hello"}\n'
    )
    assert run("--input", "-", stdin=b"\n", absent=True) == (2, "", said)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_text('{"prompt": "not this file"}')
    assert run("--input", "./-", "--quiet", script=hello)[1] == "not this file\n"
    assert run("--input", "-", "--record", "-", stdin=b"\n", absent=True)[2] == said


def test_a_chat_template_from_a_flag_makes_a_chat_of_each_prompt(run: Run, tmp_path: Path) -> None:
    template = "{% for m in messages %}({{ m.content }}){% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    for given in (template, str(tmp_path / "chat.jinja")):
        assert run("-p", "fox", "--chat-template", given, "--quiet", script=hello)[1] == "(fox)\n"
    code, out, err = run("-p", "fox", "--chat-template", "{{", "--quiet", script=hello)
    assert (code, out) == (2, "") and "(--chat-template): not a Jinja template" in err


def test_a_chat_template_from_the_environment_serves_chats_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTOCK_CHAT_TEMPLATE", "{{ messages[0].content }}!")
    assert run("-p", "fox", "--quiet", script=hello)[1] == "fox\n"
    assert run("-p", "fox", "--chat", "--quiet", script=hello)[1] == "fox!\n"


class Terminal(io.StringIO):
    """Output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "before"),
    [
        ({"TERM": "xterm"}, "\033[2mhello\033[0m"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "hello"),
        ({"TERM": "dumb"}, "hello"),
        ({"TERM": ""}, "hello"),
    ],
)
def test_a_terminal_shows_a_prompt_before_its_completion_and_no_template_before_an_answer(
    run: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], before: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = []
    for flags in ([], ["--chat"]):
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        run("--prompt", "hello", "--quiet", *flags, script=lambda request: [*b"ab", 0])
        shown.append(terminal.getvalue())
    answer = shown[1]
    assert shown[0] == f"{before}{answer}"
    assert answer.endswith("\n") and "hello" not in answer and "<|im|>" not in answer


def test_headings_of_chats_are_what_the_user_wrote(run: Run) -> None:
    _, out, _ = run("-p", "hello", "-p", "fox", "--system", "be brief", script=hello)
    assert [line for line in out.splitlines() if line.startswith("==>")] == [
        "==> 1: hello <==",
        "==> 2: fox <==",
    ]


def test_chats_may_fill_the_context_and_completions_have_100_tokens(run: Run) -> None:
    endless = {"script": lambda request: [5] * 4096}
    for flags, most in (([], 100), (["--chat"], None), (["--chat", "--max-tokens", "9"], 9)):
        _, out, _ = run("--prompt", "hello", "--json", "--quiet", *flags, **endless)
        answer = json.loads(out)
        tokens = answer["usage"]["completion_tokens"]
        assert tokens == (most or 256 - answer["usage"]["prompt_tokens"])
        assert answer["finish_reason"] == "length"
