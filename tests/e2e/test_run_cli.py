"""`headstock run` with the bundled model: as a real process where a process or a terminal
matters.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from often import often
from terminal import PROMPTS, headstock, shown

from headstock import LLM, SamplingParams
from headstock.cli.main import main

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from headstock.cli.main import main; sys.exit(main())",
    "run",
]
SMALL = ["--num-pages", "256", "--temperature", "0"]
STORY = "Once upon a time"


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`headstock run` in this process, which has imported torch, with nothing on stdin."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(["run", *arguments])
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


def text_of(llm: LLM, prompt: str, tokens: int) -> str:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=tokens))[0].outputs[0].text


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_pages=256) as llm:
        yield llm


def test_one_prompt_prints_the_text_of_the_python_api(llm: LLM) -> None:
    done = run("--prompt", STORY, "--max-tokens", "30", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_of(llm, STORY, 30) + "\n" and len(done.stdout) > 30
    assert (
        done.stderr.startswith("demo: Qwen3ForCausalLM")
        and "-v shows" in done.stderr
        and "ended by length" in done.stderr
    )
    assert "\x1b" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_standard_input_and_quiet(llm: LLM) -> None:
    done = run("--quiet", "--max-tokens", "10", *SMALL, stdin=STORY + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, text_of(llm, STORY, 10) + "\n", "")


def test_lines_may_have_a_priority_and_a_cache_salt(run_here: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    common = {"prompt": STORY * 20, "max_tokens": 4}
    lines = [
        common | {"priority": 1, "cache_salt": "mine"},
        common | {"priority": 0, "cache_salt": "mine"},
        common | {"cache_salt": "theirs"},
        common | {"priority": "high"},
        common | {"cache_salt": 7},
        {
            "messages": [{"role": "user", "content": "What is 2 + 3?"}],
            "cache_salt": "mine",
            "priority": 2,
        },
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    done = run_here(
        "--input", str(file), "--json", "--quiet", "--max-running-requests", "1", *SMALL
    )
    found = {entry["where"]: entry for entry in map(json.loads, done.stdout.splitlines())}

    cached = {
        where: entry["usage"]["cached_tokens"] for where, entry in found.items() if "usage" in entry
    }
    assert (
        done.returncode == 1
        and "priority: expected an integer" in found["prompts.jsonl:4"]["error"]
    )
    assert "cache_salt: expected a string" in found["prompts.jsonl:5"]["error"]
    assert (
        cached["prompts.jsonl:1"] > 0
        and cached["prompts.jsonl:2"] == cached["prompts.jsonl:3"] == 0
    )
    assert found["prompts.jsonl:6"]["text"]


@pytest.mark.full
def test_a_file_with_a_bad_line_answers_the_others_and_exits_1(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = [f"{STORY}, {name}" for name in ("Anna", "a boat", "the king")]
    lines = [json.dumps({"prompt": prompt, "max_tokens": 12}) for prompt in prompts]
    lines[1:1] = ["{bad", json.dumps({"prompt": "x" * 10_000})]
    file.write_text("\n".join(lines))
    done = run("--input", str(file), "--json", "--quiet", *SMALL)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert [entry["text"] for entry in found if "text" in entry] == [
        text_of(llm, prompt, 12) for prompt in prompts
    ]
    bad, long = done.stderr.splitlines()
    assert f"{file.name}:2: not valid JSON" in bad and f"{file.name}:3: prompt has" in long
    assert "sequences may have 4096 here" in long


@pytest.mark.feature("S22")
def test_a_prompt_longer_than_max_seq_len_is_one_line_with_both_numbers_and_others_are_answered(
    run_here: Run, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": prompt, "max_tokens": 4}) for prompt in (STORY * 40, STORY))
    )
    done = run_here("--input", str(file), "--json", "--quiet", "--max-seq-len", "64", *SMALL)

    refused, answered = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1 and refused["where"] == "prompts.jsonl:1" and answered["text"]
    (line,) = done.stderr.splitlines()
    assert re.search(
        r"prompts\.jsonl:1: prompt has \d{3} tokens, but sequences may have 64 here", line
    )


@pytest.mark.feature("H16", "T17")
def test_refusing_under_pressure_and_keeping_one_prefix_by_flags(
    run_here: Run, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    one, other = (f"{name} had a boat. " * 8 for name in ("Anna", "Otto"))
    file.write_text(
        "\n".join(
            json.dumps({"prompt": prompt, "max_tokens": 4}) for prompt in (one, one, other, one)
        )
    )
    flags = ["--prefix-cache-n", "1", "--on-pressure", "reject", "--memory-threshold", "0.3"]
    pool = [
        "--num-pages",
        "24",
        "--max-seq-len",
        "256",
        "--max-running-requests",
        "1",
        "--temperature",
        "0",
    ]
    done = run_here("--input", str(file), "--json", "--quiet", *flags, *pool)
    found = sorted(
        (json.loads(line) for line in done.stdout.splitlines()), key=lambda entry: entry["where"]
    )

    assert done.returncode == 0, done.stderr
    assert [entry["usage"]["cached_tokens"] > 0 for entry in found] == [False, True, False, False]
    assert found[0]["text"] == found[1]["text"] == found[3]["text"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    often(
        6,
        [
            (["--input", "/no/such/file.jsonl"], 6, "cannot read /no/such/file.jsonl"),
            (["--prompt", "x", "--model", "/no/such/model"], 6, "/no/such/model"),
            (["--prompt", "x", "--temperature", "nan"], 2, "temperature"),
            (["--prompt", "x", "--attn", "sdap"], 2, "did you mean sdpa"),
            (
                ["--prompt", "x " * 9000],
                1,
                "prompt has 18000 tokens, but sequences may have 4096 here",
            ),
            (["--prompt", "x", "--input", "/"], 6, "cannot read /: Is a directory"),
            (["--prompt", "x", "--model", "/"], 6, "config.json is missing"),
            (
                ["--prompt", "x", "--max-tokens", "9" * 30],
                2,
                "expected 2147483647 or less, got 9999",
            ),
            (["--prompt", "x", "--record", "/"], 6, "cannot be written: Is a directory"),
            ([], 2, "no prompt"),
            (["--prompt", ""], 1, "--prompt '': prompt is empty"),
        ],
    ),
)
def test_each_error_is_one_clear_line_with_its_exit_code(
    run_here: Run, arguments: list[str], code: int, said: str
) -> None:
    done = run_here(*arguments, "--num-pages", "256", "--quiet")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code"), often(1, [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
)
def test_text_streams_and_a_signal_ends_it_cleanly(number: signal.Signals, code: int) -> None:
    arguments = [
        "--prompt",
        STORY,
        "--max-tokens",
        "4000",
        "--num-pages",
        "256",
        "--temperature",
        "1",
        "--seed",
        "1",
    ]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    alive = process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert first and alive
    assert process.returncode == code, err
    assert b"Traceback" not in err


def grown(file: Path, times: int) -> None:
    """Wait until the file has been written to so often."""
    deadline, size = time.monotonic() + 600, 0
    while times and time.monotonic() < deadline:
        time.sleep(0.05)
        if file.exists() and file.stat().st_size > size:
            size, times = file.stat().st_size, times - 1


@pytest.mark.full
def test_a_batch_that_is_broken_off_prints_the_answers_that_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lengths = (3900, 6, 6)
    file.write_text(
        "".join(
            json.dumps({"prompt": STORY, "max_tokens": n, "ignore_eos": True}) + "\n"
            for n in lengths
        )
    )
    record = tmp_path / "run.recording"  # of which something is written every quarter of a second
    arguments = [
        "--input",
        str(file),
        "--json",
        "--quiet",
        "--num-pages",
        "512",
        "--record",
        str(record),
    ]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    grown(record, 3)  # the short answers take a few steps, the long one half a minute
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)

    assert process.returncode == 130, err
    assert [json.loads(line)["request"] for line in out.splitlines()] == [2, 3], out
    assert "interrupted before the answer to prompts.jsonl:1 was complete" in err


@pytest.mark.full
def test_a_reader_that_has_enough_ends_the_run_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lengths = (2, 200, 3900)
    file.write_text(
        "".join(
            json.dumps({"prompt": STORY, "max_tokens": n, "ignore_eos": True}) + "\n"
            for n in lengths
        )
    )
    arguments = ["--input", str(file), "--json", "--quiet", "--num-pages", "512"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    first = json.loads(process.stdout.readline())
    process.stdout.close()

    assert (process.wait(timeout=600), process.stderr.read(), first["request"]) == (141, "", 1)
    process.stderr.close()


@pytest.mark.feature("T6")
def test_preemptions_are_told_of_each_answer_and_of_all(run_here: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": f"{name} had a boat.", "max_tokens": 60, "ignore_eos": True}
        for name in ("Anna", "Otto", "Tim")
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    done = run_here(
        "--input",
        str(file),
        "--json",
        "--num-pages",
        "8",
        "--max-seq-len",
        "96",
        "--temperature",
        "0",
    )
    told = [json.loads(line)["preemptions"] for line in done.stdout.splitlines()]

    assert done.returncode == 0 and len(told) == 3 and sum(told) > 0, done.stderr
    assert re.search(
        rf"^3 prompts, 0 failed; 180 tokens in .* tokens/s, {sum(told)} preemptions$",
        done.stderr,
        re.MULTILINE,
    )


@pytest.mark.full
def test_quiet_writes_nothing_to_a_terminal_but_the_text() -> None:
    master, slave = pty.openpty()
    arguments = ["--prompt", STORY, "--prompt", STORY, "--quiet", "--max-tokens", "3", *SMALL]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave
    )
    out, _ = process.communicate(timeout=600)
    os.set_blocking(master, False)
    with pytest.raises(BlockingIOError):
        os.read(master, 1)
    os.close(slave)
    os.close(master)
    assert process.returncode == 0 and b"==> 2" in out


@pytest.mark.full
def test_answers_go_to_a_file_while_progress_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    file = tmp_path / "answers.jsonl"
    arguments = ["--prompt", STORY, "--prompt", STORY, "--json", "--max-tokens", "30", *SMALL]
    with file.open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=slave
        )
        drawn = b""
        while process.poll() is None:
            if select.select([master], [], [], 0.1)[0]:
                drawn += os.read(master, 65536)
    os.close(slave)
    os.close(master)

    assert process.returncode == 0 and b"2 of 2" in drawn and STORY.encode() not in drawn
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()] == [STORY, STORY]


@pytest.mark.full
def test_answers_on_the_terminal_that_shows_progress_stay_whole_lines() -> None:
    code, lines = shown(
        "run", "--prompt", STORY, "--prompt", STORY, "--json", "--max-tokens", "60", *SMALL
    )
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert code == 0 and [answer["prompt"] for answer in answers] == [STORY, STORY]


@pytest.mark.full
def test_closed_output_is_no_error() -> None:
    command = [*COMMAND, "--prompt", "x", "--max-tokens", "2", *SMALL]
    assert (
        subprocess.run(
            ["/bin/sh", "-c", '"$@" >&- 2>&- <&-', "sh", *command], check=False, timeout=600
        ).returncode
        == 0
    )


def test_a_chat_in_a_terminal_edits_pastes_stops_and_leaves(tmp_path: Path) -> None:
    chat = headstock(
        "run", *SMALL, "--quiet", "--ignore-eos", "--max-tokens", "4000", state=tmp_path
    )
    chat.expect("exit leaves")
    chat.expect(PROMPTS)
    chat.send("never sent\x03")
    chat.expect("Ctrl-C again leaves")
    chat.expect(PROMPTS)
    chat.send("\x1b[200~Once\nupon\na\ntime\x1b[201~\r")  # four lines pasted, then Enter
    chat.expect(r"[a-z]+ [a-z]+ [a-z]+")
    chat.sendintr()
    chat.expect_exact("[stopped]")
    chat.expect(PROMPTS)
    chat.send("/stats\r")
    chat.expect("chat: 1 answer, ")  # not four
    chat.expect(PROMPTS)
    chat.send("\x03")
    chat.expect("Ctrl-C again leaves")
    chat.expect(PROMPTS)
    chat.send("\x03")
    chat.expect("chat ended: 1 answer, ")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    remembered = (tmp_path / "headstock" / "history").read_text()
    assert (
        remembered.count("\n# ") == 2
        and "+Once\n+upon\n+a\n+time\n" in remembered
        and "never" not in remembered
    )


@pytest.mark.full
def test_sigterm_at_the_prompt_ends_a_chat_and_leaves_the_terminal_as_it_was(
    tmp_path: Path,
) -> None:
    chat = headstock("run", *SMALL, "--quiet", "--history", "off", state=tmp_path)
    chat.expect(PROMPTS)
    before = chat.before
    chat.kill(signal.SIGTERM)
    chat.expect(r"\x1b\[\?2004l")  # pasted texts are no longer marked
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 143 and "Traceback" not in before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_terminal_begins_a_chat() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *SMALL],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(slave)
    os.write(master, b"What is 2 + 3?\n/stats\n/exit\n")
    out, err = process.communicate(timeout=600)
    os.close(master)
    assert process.returncode == 0, err
    assert "5" in out and "chat: 1 answer, " in err and "/help lists the commands" in err


@pytest.mark.parametrize(
    ("variable", "arguments"),
    often(
        1,
        [
            ("NO_COLOR", ("plugins", "list")),
            ("NO_COLOR", ("run", *SMALL, "--prompt", "12 + 30 =", "--prompt", "Once")),
            ("NO_COLOR", ("run", *SMALL, "--prompt", "12 + 30 =")),
            ("TERM", ("plugins", "list")),
            ("TERM", ("run", *SMALL, "--prompt", "12 + 30 =", "--prompt", "Once")),
            ("TERM", ("run", *SMALL, "--prompt", "12 + 30 =")),
        ],
    ),
)
def test_a_dumb_terminal_gets_no_escape_sequence_and_no_color_no_style(
    variable: str, arguments: tuple[str, ...]
) -> None:
    value, forbidden = {
        "TERM": ("dumb", r"\x1b"),
        "NO_COLOR": ("1", r"\x1b\[[1-9]\d*m"),
    }[variable]
    process = headstock(*arguments, **{variable: value})
    text = process.read()
    process.close()
    assert process.exitstatus == 0, text
    assert re.search(forbidden, text) is None, text


@pytest.mark.full
def test_a_chat_in_a_dumb_terminal_has_no_escape_sequence(tmp_path: Path) -> None:
    chat = headstock("run", *SMALL, "--history", "off", state=tmp_path, TERM="dumb")
    chat.expect("> ")
    chat.sendline("What is the capital of France?")
    chat.expect("Paris")
    chat.sendline("/exit")
    text = chat.before + chat.read()
    chat.close()
    assert chat.exitstatus == 0 and "\x1b" not in text
