"""`headstock run` given what it cannot serve: which line, which flag, and what is done about the
others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstock.errors import shorten

from .running import Run, hello

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
    assert [
        line.split(":")[2]
        for line in err.splitlines()
        if line.startswith("headstock: prompts.jsonl:")
    ] == [
        "2",
        "4",
        "5",
        "6",
        "7",
        "8",
        "11",
    ]
    assert (
        "did you mean temperature" in err
        and "temperature: expected a number between 0 and 2, got nan" in err
    )
    found = [json.loads(line) for line in out.splitlines()]
    answers = [entry for entry in found if "error" not in entry]
    assert sorted(entry["request"] for entry in found if "error" in entry) == [2, 3, 4, 5, 6, 7, 10]
    assert [(entry["request"], entry["answer"]) for entry in answers] == [
        (1, 1),
        (8, 1),
        (9, 1),
        (9, 2),
    ]
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
def test_a_missing_or_empty_file_is_one_line(
    run: Run, tmp_path: Path, content: bytes | None, code: int
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    found, out, err = run("--input", str(file))
    assert (found, out, len(err.splitlines())) == (code, "", 1)
    assert run("--input", str(tmp_path))[0] == 6


def test_a_recording_is_not_written_over_the_prompts(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}')
    code, out, err = run(
        "--input", str(file), "--record", f"{tmp_path}/./prompts.jsonl", absent=True
    )
    assert (code, out, len(err.splitlines())) == (
        2,
        "",
        1,
    ) and "--input and --record are both" in err


BAD_LINES = {
    '{"prompt_token_ids": "abc"}': "prompt_token_ids: expected a list of token ids, got str abc",
    '{"prompt_token_ids": null}': "prompt_token_ids: expected a list of token ids, got None",
    '{"prompt_token_ids": {"a": 1}}': "prompt_token_ids: expected a list of token ids, got dict",
    '{"prompt_token_ids": []}': "prompt is empty",
    '{"prompt_token_ids": [5, 1e400]}': "prompt token ids: expected integers from 0 to 2147483647, "
    "got float inf",
    '{"prompt_token_ids": [5, true]}': "got bool True",
    '{"prompt_token_ids": [99999999999999999999]}': "got int 99999999999999999999",
    '{"prompt": 5}': "prompt: expected text, got int 5",
    '{"prompt": null}': "prompt: expected text, got None",
    '{"prompt": [5, 6]}': "prompt: expected text, got list",
    '{"prompt": {"prompt": "x"}}': "prompt: expected text, got dict",
    '{"prompt": "x", "cache_salt": 5}': "cache_salt: expected a string of 1 to 256 characters, got "
    "int 5",
    '{"prompt": "x", "cache_salt": "\\ud83d"}': "cache_salt holds characters that are not valid "
    "Unicode",
    '{"prompt": "x", "priority": "high"}': "priority: expected an integer of at most 31 bits, got "
    "high",
    '{"prompt": "x", "": 1}': "no sampling parameter is called ''; known are",
    '{"messages": 5}': "messages: expected a list of one or more turns, got int 5",
    '{"messages": [5]}': "messages[0]: expected an object with a role and content, got int 5",
    '{"messages": [{"content": "x"}]}': "messages[0].role: expected text, got None",
    '{"messages": [{"role": "system", "content": "x"}, {"role": "user"}]}': "messages[1] (role "
    "user) has no content",
    "5": "expected a JSON object with prompt or messages, got int 5",
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
    assert (code, out) == (
        1,
        f"==> {len(BAD_LINES) + 1}: fox <==\nfox\n\n",
    ) and err.splitlines() == lines


@pytest.mark.feature("H10")
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
def test_what_is_wrong_without_a_model_is_said_before_one_is_loaded(
    run: Run, arguments: list[str], code: int
) -> None:
    found, out, err = run(*arguments, absent=True)
    assert (found, out, len(err.splitlines())) == (code, "", 1)


def test_token_ids_cannot_go_through_the_template(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5]}')
    code, _, err = run("--input", str(file), "--chat", absent=True)
    assert (
        code == 1
        and "prompts.jsonl:1: prompt: expected text to go through the chat template, got token ids"
        in err
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "nan"],
        ["--top-p", "0"],
        ["--stop", "x" * 257],
        [*["--stop", "x"] * 17],
        ["--nonsense"],
        ["m", "word", "another"],
    ],
)
def test_bad_flags_are_usage_errors_before_a_model_is_loaded(
    run: Run, arguments: list[str]
) -> None:
    code, out, err = run("-p", "a", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_sampling_errors_name_the_parameters(run: Run, tmp_path: Path) -> None:
    code, _, err = run("-p", "a", "--min-tokens", "9", "--max-new-tokens", "5", absent=True)
    assert (code, err) == (
        2,
        "headstock: min_tokens: expected max_tokens (5) or less, got 9\n",
    )
    code, _, err = run("-p", "a", "--quiet", "--stop-token-ids", "999999")
    assert code == 1 and "stop_token_ids: expected token ids from 0 to " in err
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "stop_token_ids": [999999]}')
    code, _, err = run("--input", str(file), "--quiet")
    assert code == 1 and "prompts.jsonl:1: stop_token_ids: expected token ids from 0 to " in err


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_text_for_a_model_without_a_tokenizer_is_a_model_error(
    run: Run, tmp_path: Path, chat: list[str]
) -> None:
    code, out, err = run("--prompt", "x", "--quiet", *chat, directory=tmp_path)
    assert (code, out, len(err.splitlines())) == (6, "", 1)
    assert err.startswith(
        f"headstock: no tokenizer in {shorten(tmp_path)}; looked for tokenizer.json, "
    )


@pytest.mark.parametrize("chat", [[], ["--chat"]])
@pytest.mark.parametrize("prompt", [["--prompt", "x"], []])
def test_text_is_refused_before_weights_without_a_tokenizer_are_loaded(
    run: Run, tmp_path: Path, prompt: list[str], chat: list[str]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    )
    code, out, err = run(
        "--model", str(tmp_path), "--quiet", *prompt, *chat, stdin=b"x", absent=True
    )
    assert (code, out, len(err.splitlines())) == (6, "", 1)
    assert err.startswith(
        f"headstock: no tokenizer in {shorten(tmp_path)}; looked for tokenizer.json, "
    )


def test_token_ids_need_no_tokenizer(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt_token_ids": [5, 6], "max_tokens": 3, "ignore_eos": true, "logprobs": 1}'
    )
    code, out, err = run("--input", str(file), "--json", "--quiet", directory=tmp_path)
    found = json.loads(out)
    assert (code, err, found["text"], len(found["token_ids"])) == (0, "", "", 3)
    code, out, err = run("--input", str(file), "--quiet", directory=tmp_path)
    assert code == 0
    assert err == "note: without a tokenizer answers have no text; --json shows their token ids\n"
    file.write_text('{"prompt_token_ids": [5, 6], "stop": "x"}')
    code, _, err = run("--input", str(file), "--json", "--quiet", directory=tmp_path)
    assert code == 1 and "stop needs text; no tokenizer in " in err and "stop_token_ids" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["two words"], "the first word is the model, and no model is called two words"),
        (["m", "--model", "n"], "the model is given twice, as m and as --model n; give one"),
        (["m", "a prompt", "another"], "unexpected argument another (the first word is the model"),
    ],
)
def test_words_without_a_flag_are_a_model_and_a_prompt(
    run: Run, words: list[str], said: str
) -> None:
    code, out, err = run(*words, absent=True)
    assert (code, out) == (2, "") and err.startswith(f"headstock: {said}")
