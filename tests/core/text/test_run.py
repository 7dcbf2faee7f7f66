"""`headstock run` over a scripted engine: inputs, output forms, failures."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstock.cli import run as verb
from headstock.cli.chat import converse
from headstock.cli.main import main
from headstock.llm import LLM
from headstock.sampling_params import SamplingParams
from headstock.text.tokenizer import Tokenizer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `headstock run ARGUMENTS` with standard input from bytes; the exit code, output and errors.

    `absent`: loading a model fails the test.
    """

    def call(*arguments: str, stdin: bytes = b"", absent: bool = False, **options: Any) -> tuple[int, str, str]:
        def load(config: Any, report: Any) -> LLM:
            assert not absent, "no model was to be loaded"
            return scripted(**options)[0]

        monkeypatch.setattr("headstock.llm.LLM", load)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setenv("HEADSTOCK_TRACEBACK", "0")
        code = main(["run", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def hello(request: Any) -> list[int]:
    """Says the prompt again, then ends."""
    return [*map(int, request.prompt), 0]


def test_one_prompt_prints_its_text_alone_and_a_summary_on_standard_error(run: Run) -> None:
    code, out, err = run("--prompt", "hello fox", script=hello)
    assert (code, out) == (0, "hello fox\n")
    assert "model: scripted" in err and "ended by stop" in err
    assert run("--prompt", "hello fox", "--quiet", script=hello) == (0, "hello fox\n", "")


def test_standard_input_is_one_prompt_without_its_last_line_break(run: Run) -> None:
    assert run("--quiet", stdin=b"two\nlines\n", script=hello)[1] == "two\nlines\n"


@pytest.mark.parametrize(("stdin", "code", "said"), [(b"", 2, "no prompt: give --prompt"), (b"\xff", 6, "as UTF-8")])
def test_empty_or_unreadable_standard_input_is_one_line(run: Run, stdin: bytes, code: int, said: str) -> None:
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


def test_T6_the_summaries_and_json_count_preemptions_and_failures(run: Run) -> None:
    code, out, err = run("-p", "hello", "-p", "", "-p", "fox", "--json", script=hello, preempted=2)
    assert code == 1 and [json.loads(line).get("preemptions") for line in out.splitlines()] == [None, 2, 2]
    assert re.search(
        r"^3 prompts, 1 failed; \d+ tokens in [\d.]+ s, [\d.]+ tokens/s, 4 preemptions$", err, re.MULTILINE
    )
    assert run("-p", "hello", script=hello, preempted=2)[2].endswith(", ended by stop, preempted 2 times\n")
    assert run("-p", "hello", script=hello)[2].endswith(", ended by stop\n")
    code, out, err = run("-p", "a", "-p", "b", script=hello, refuse={"0"})
    assert code == 1 and "2 prompts, 1 failed; " in err


LINES = [
    '{"prompt": "hello", "max_tokens": 1, "ignore_eos": true}',
    "{bad",
    "",
    '["prompt"]',
    '{"prompt": "x", "messages": []}',
    '{"prompt": "x", "temprature": 1}',
    '{"prompt": "x", "temperature": NaN}',
    '{"prompt": ""}',
    '{"messages": [{"role": "user", "content": "fox"}]}',
    '{"prompt_token_ids": [5, 6], "n": 2, "logprobs": 1}',
    '{"prompt": "\\ud83d"}',
]


def test_bad_lines_are_named_by_number_and_the_others_still_run(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(LINES))
    code, out, err = run("--input", str(file), "--json", "--quiet", script=hello)
    assert code == 1 and "Traceback" not in err
    assert [line.split(":")[2] for line in err.splitlines() if line.startswith("headstock: prompts.jsonl:")] == [
        "2",
        "4",
        "5",
        "6",
        "7",
        "8",
        "11",
    ]
    assert "did you mean temperature" in err and "temperature must be between 0 and 2, got nan" in err
    found = [json.loads(line) for line in out.splitlines()]
    answers = [entry for entry in found if "error" not in entry]
    assert sorted(entry["request"] for entry in found if "error" in entry) == [2, 3, 4, 5, 6, 7, 10]
    assert [(entry["request"], entry["answer"]) for entry in answers] == [(1, 1), (8, 1), (9, 1), (9, 2)]
    assert len(answers[0]["token_ids"]) == 1
    assert answers[1]["prompt"] == "<|im|>user: fox\n<|im|>assistant: "
    assert answers[2]["logprobs"][0][0]["rank"] == 1


def test_one_prompt_that_fails_leaves_the_others_and_exits_1(run: Run) -> None:
    code, out, err = run("-p", "a", "-p", "", "-p", "b", "--quiet", script=hello)
    assert (code, out) == (1, "==> 1: a <==\na\n\n==> 3: b <==\nb\n\n")
    assert err == "headstock: --prompt '': prompt is empty; give it at least one character\n"
    code, out, err = run("-p", "a", "-p", "b", "--quiet", script=hello, refuse={"0"})
    assert code == 1 and "refused by the script" in err and "==> 2: b <==\nb\n" in out
    assert run("-p", "a", "--quiet", refuse={"0"})[0] == 1


@pytest.mark.parametrize(("content", "code"), [(None, 6), (b"\n\n", 2)])
def test_a_missing_or_empty_file_is_one_line(run: Run, tmp_path: Path, content: bytes | None, code: int) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    found, out, err = run("--input", str(file))
    assert (found, out, len(err.splitlines())) == (code, "", 1)
    assert run("--input", str(tmp_path))[0] == 6


def test_a_recording_is_not_written_over_the_prompts(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}')
    code, out, err = run("--input", str(file), "--record", f"{tmp_path}/./prompts.jsonl", absent=True)
    assert (code, out, len(err.splitlines())) == (2, "", 1) and "--input and --record are both" in err


BAD_LINES = {
    '{"prompt_token_ids": "abc"}': "prompt_token_ids must be a list of token ids, got str abc",
    '{"prompt_token_ids": null}': "prompt_token_ids must be a list of token ids, got None",
    '{"prompt_token_ids": {"a": 1}}': "prompt_token_ids must be a list of token ids, got dict",
    '{"prompt_token_ids": []}': "prompt is empty",
    '{"prompt_token_ids": [5, 1e400]}': "prompt token ids must be integers from 0 to 2147483647, got float inf",
    '{"prompt_token_ids": [5, true]}': "got bool True",
    '{"prompt_token_ids": [99999999999999999999]}': "got int 99999999999999999999",
    '{"prompt": 5}': "prompt must be text, got int 5",
    '{"prompt": null}': "prompt must be text, got None",
    '{"prompt": [5, 6]}': "prompt must be text, got list",
    '{"prompt": {"prompt": "x"}}': "prompt must be text, got dict",
    '{"prompt": "x", "cache_salt": 5}': "cache_salt must be a string of 1 to 256 characters, got int 5",
    '{"prompt": "x", "cache_salt": "\\ud83d"}': "cache_salt holds characters that are not valid Unicode",
    '{"prompt": "x", "priority": "high"}': "priority must be an integer of at most 31 bits, got high",
    '{"prompt": "x", "": 1}': "no sampling parameter is called ''; known are",
    '{"messages": 5}': "messages must be a list of one or more turns, got int 5",
    '{"messages": [5]}': "messages[0] must be an object with a role and content, got int 5",
    '{"messages": [{"content": "x"}]}': "messages[0].role must be text, got None",
    '{"messages": [{"role": "system", "content": "x"}, {"role": "user"}]}': "messages[1] (role user) has no content",
    "5": "must be a JSON object with prompt or messages, got int 5",
    '{"prompt": "x", "seed": ' + "9" * 5000 + "}": "not valid JSON: Exceeds the limit",
    "[" * 100_000: "not valid JSON: maximum recursion depth exceeded",
}


def test_lines_that_no_model_could_serve_are_refused_before_one_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(BAD_LINES))
    code, out, err = run("--input", str(file), "--json", absent=True)
    lines = err.splitlines()
    assert code == 1 and len(lines) == len(BAD_LINES) == len(out.splitlines())
    for number, (line, said) in enumerate(zip(lines, BAD_LINES.values(), strict=True), 1):
        assert line.startswith(f"headstock: prompts.jsonl:{number}: ") and said in line
    file.write_text("\n".join([*BAD_LINES, '\ufeff{"prompt": "fox"}']))
    code, out, err = run("--input", str(file), "--quiet", script=hello)
    assert (code, out) == (1, f"==> {len(BAD_LINES) + 1}: fox <==\nfox\n\n") and err.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--prompt", ""], 1),
        (["--prompt", "a\udcff"], 1),
        (["--prompt", "x", "--system", "a\udcff"], 2),
        (["--prompt", "x", "--min-p", "2"], 2),
        (["--prompt", "x", "--input", "no-such-file.jsonl"], 6),
    ],
)
def test_H10_what_is_wrong_without_a_model_is_said_before_one_is_loaded(
    run: Run, arguments: list[str], code: int
) -> None:
    found, out, err = run(*arguments, absent=True)
    assert (found, out, len(err.splitlines())) == (code, "", 1)


def test_token_ids_cannot_go_through_the_template(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5]}')
    code, _, err = run("--input", str(file), "--chat", absent=True)
    assert code == 1 and "prompts.jsonl:1: prompt must be text to go through the chat template, got token ids" in err


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
    assert notes("-p", "aaaa") == notes("-p", "aaaa", "--max-tokens", "12") == []  # 100 is nobody's wish
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "aaaa", "max_tokens": 13}')
    _, out, err = run("--input", str(file), "--json", "--quiet", max_seq_len=16)
    answer = json.loads(out)
    assert "prompts.jsonl:1: max_tokens is cut from 13 to 12" in err
    assert (answer["max_tokens"], len(answer["token_ids"]), answer["finish_reason"]) == (12, 12, "length")


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "nan"],
        ["--top-p", "0"],
        ["--stop", "x" * 129],
        [*["--stop", "x"] * 17],
        ["--nonsense"],
        ["word"],
    ],
)
def test_bad_flags_are_usage_errors_before_a_model_is_loaded(run: Run, arguments: list[str]) -> None:
    code, out, err = run("-p", "a", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_quiet_draws_no_bar_while_loading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(config: Any, report: Any) -> SimpleNamespace:
        report("weights", 5, 10)
        return SimpleNamespace(engine=SimpleNamespace(summary=SimpleNamespace(lines=lambda: ["model: none"])))

    monkeypatch.setattr("headstock.llm.LLM", load)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    resolved = verb.resolve(verb.parser().parse_args([]), {})
    verb.opened(resolved, quiet=True)
    assert capsys.readouterr() == ("", "")
    verb.opened(resolved, quiet=False)
    assert "weights" in capsys.readouterr().err


def test_an_interrupt_exits_130_and_closes_the_engine(
    run: Run, scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    code, _, err = run("-p", "a", "--max-tokens", "1000000", max_seq_len=1 << 20)
    assert code == 130 and "Traceback" not in err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, headstock.cli.main as m; code = m.main(['run', '--help']);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=150, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--prompt" in done.stdout and "--attn" in done.stdout


def test_S10_a_chat_limits_graph_buckets_to_one_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("headstock.llm.LLM", lambda config, report: seen.append(config))
    for flags in ([], ["--cuda-graph-max-bs", "4"]):
        resolved = verb.resolve(verb.parser().parse_args(flags), {})
        verb.opened(resolved, quiet=True, alone=True)
    assert [config.cuda_graph_max_bs for config in seen] == [1, 4]


class Typing:
    """Reads typed lines; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


def test_a_chat_remembers_resets_and_saves(scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm: LLM
    llm, loop = scripted(script=lambda request: [*llm.tokenizer.encode("hello fox"), 0], max_seq_len=4096)
    file = tmp_path / "chat.json"
    typed = Typing("hi", "again", f"/save {file}", f"/save {file}", "/save", "/stats", "/nonsense", "", "/reset",
                   "anew", "/system be brief", "x", "/system", "y", "/help", "/exit", "never")  # fmt: skip
    assert converse(llm, SamplingParams(), None, typed) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello fox\n" * 5
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello fox"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "hello fox"},
    ]
    assert json.loads(file.read_text()) == {"messages": talk}
    prompts = [llm.tokenizer.decode(request.prompt, skip_special_tokens=False) for request in loop.seen]
    assert prompts[1] == "<|im|>user: hi\n<|im|>assistant: hello fox\n<|im|>user: again\n<|im|>assistant: "
    assert prompts[2] == "<|im|>user: anew\n<|im|>assistant: "
    assert prompts[3].startswith("<|im|>system: be brief\n<|im|>user: x\n")
    assert prompts[4] == "<|im|>user: y\n<|im|>assistant: "
    for said in ("saved 4 turns", "exists; choose another name", "needs the name of a file", "chat: 2 answers",
                 "no command /nonsense", "/reset        forget"):  # fmt: skip
        assert said in captured.err
    assert typed.lines == ["never"]


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llm, loop = scripted(max_seq_len=1 << 20)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    code = converse(llm, SamplingParams(max_tokens=None), None, Typing("hi", "/stats"))
    captured = capsys.readouterr()
    assert code == 0 and "[stopped]" in captured.out and "ended by Ctrl-C" in captured.err
    assert loop.aborted == ["0"]
    with pytest.raises(KeyboardInterrupt):
        converse(llm, SamplingParams(), None, Typing(KeyboardInterrupt()))


def test_a_chat_that_grew_too_long_says_so_and_goes_on(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = scripted(max_seq_len=64)
    assert converse(llm, SamplingParams(max_tokens=2), None, Typing("hello " * 60, "hi")) == 0
    captured = capsys.readouterr()
    assert "but sequences may have 64 here" in captured.err and len(captured.out.splitlines()) >= 1


def test_a_chat_needs_a_template(scripted: Any, byte_fallback: Path) -> None:
    from headstock.errors import UsageError

    llm, _ = scripted(directory=byte_fallback)
    with pytest.raises(UsageError, match="no chat template"):
        converse(llm, SamplingParams(), None, Typing("hi"))
