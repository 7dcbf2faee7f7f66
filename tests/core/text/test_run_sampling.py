"""`headstock run` with sampling flags, over a scripted engine: several answers, log-probabilities,
a chat.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from .running import Run, hello


def test_sampling_flags_reach_each_prompt_and_its_own_values_win(run: Run) -> None:
    seen = []

    def script(request: SimpleNamespace) -> list[int]:
        seen.append(request)
        return hello(request)

    flags = [
        "--ignore-eos",
        "--frequency-penalty",
        "0.5",
        "--logit-bias",
        "7=1",
        "--min-tokens",
        "1",
    ]
    lines = b'{"prompt": "hello", "frequency_penalty": 0.25}\n{"prompt": "hello"}'
    assert run("--input", "-", "--quiet", *flags, stdin=lines, script=script)[0] == 0
    first, second = {request.id: request for request in seen}.values()
    assert (first.params.frequency_penalty, second.params.frequency_penalty) == (0.25, 0.5)
    assert first.params.logit_bias == second.params.logit_bias == {7: 1.0}
    assert first.stop_ids == () and first.min_tokens == 1


def test_several_answers_come_under_headings_of_their_own(run: Run) -> None:
    code, out, _ = run("-p", "hello", "-n", "2", "--quiet", script=hello)
    assert (code, out) == (0, "==> 1.1: hello <==\nhello\n\n==> 1.2: hello <==\nhello\n\n")
    lines = run("-p", "hello", "-n", "2", "--quiet", "--json", script=hello)[1].splitlines()
    assert [json.loads(line)["answer"] for line in lines] == [1, 2]


def test_log_probabilities_are_a_table_behind_the_text(run: Run) -> None:
    code, out, err = run("-p", "fox", "--logprobs", "2", "--quiet", script=hello)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "fox",
        "",
        "PLACE   TOKEN      LOGPROB  LIKELIEST",
        'answer  "fo"       -0.5000  "fo" -0.5000, "$" -2.0000',
        'answer  "x"        -0.5000  "x" -0.5000, "$" -2.0000',
        'answer  "<|end|>"  -0.5000  "<|end|>" -0.5000, "$" -2.0000',
    ]


def test_log_probabilities_of_the_prompt_come_first(run: Run) -> None:
    code, out, _ = run("-p", "fox", "--prompt-logprobs", "0", "--quiet", "-p", "a b", script=hello)
    assert code == 0
    blocks = out.split("==> ")[1:]
    assert blocks[0].splitlines()[2:4] == ["", "PLACE   TOKEN  LOGPROB  LIKELIEST"]
    (row,) = blocks[1].splitlines()[4:5]  # the first token has no log-probability
    assert row == 'prompt  " "    -1.0000'


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-n", "2"], "a chat gives one answer"),
        (["--logprobs", "1"], "a chat shows no log-probabilities"),
        (["--prompt-logprobs", "0"], "a chat shows no log-probabilities"),
    ],
)
def test_a_chat_refuses_what_it_cannot_show(
    run: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    monkeypatch.setattr("headstock.cli.run.has_terminal", lambda: True)
    code, out, err = run(*flags, absent=True)
    assert (code, out) == (2, "") and said in err and err.endswith("or text on standard input\n")
