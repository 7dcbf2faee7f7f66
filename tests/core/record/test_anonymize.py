"""What a recording says of tokens: which beginnings are equal, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from core.record.runs import make_requests, make_run_limits, record_run
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_workloads import request
from toy_workloads import request as toy_request

from headstock.record.anonymize import STOP, TokenAnonymizer
from headstock.record.file import read_recording
from headstock.scheduler import Arrived, Plan, RequestState, Sampled

SECRET = b"s" * 32
TOKENS = st.lists(st.integers(0, 3), min_size=0, max_size=24)


def make_anonymizer(unit: int, secret: bytes = SECRET) -> TokenAnonymizer:
    """Names for pages of `unit` tokens."""
    return TokenAnonymizer(make_run_limits(page_size=unit), secret)


def int32_array(tokens: list[int]) -> np.ndarray:
    """Tokens as the scheduler has them."""
    return np.array(tokens, np.int32)


@given(TOKENS, TOKENS, TOKENS, st.sampled_from([1, 2, 3, 4, 8]), st.booleans())
def test_pages_get_equal_names_exactly_when_they_and_all_before_them_are_equal(
    start: list[int], one: list[int], other: list[int], unit: int, same_space: bool
) -> None:
    anonymizer = make_anonymizer(unit)
    a, b = int32_array(start + one), int32_array(start + other)
    hidden_a = anonymizer.anonymize_prompt(a, "x")[0]
    hidden_b = anonymizer.anonymize_prompt(b, "x" if same_space else "y")[0]
    for stop in range(unit, min(len(a), len(b)) + 1, unit):
        equal = same_space and a[:stop].tolist() == b[:stop].tolist()
        assert (hidden_a[:stop].tolist() == hidden_b[:stop].tolist()) == equal


def admit_request(anonymizer: TokenAnonymizer, tokens: list[int], **changes: object) -> None:
    """Seat a request in row 0 as number 1."""
    one = request("a", tokens, 50, **changes)
    zeros = np.zeros(1, np.int32)
    ones = zeros + 1
    plan = Plan(number=0, num_decode=0, rows=zeros, admission_ids=ones, starts=zeros, stops=ones,
    num_logits=zeros,
                samples=zeros, new_row_ids=zeros)  # fmt: skip
    anonymizer.add_rows(plan, (RequestState(request=one, tokens=one.prompt, arrival=1),))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    TOKENS,
    st.sampled_from([1, 2, 3, 4, 8]),
    st.booleans(),
)
@settings(max_examples=60)
def test_sampled_tokens_get_the_names_that_a_prompt_with_them_gets(
    prompt: list[int], output: list[int], unit: int, drafted: bool
) -> None:
    anonymizer = make_anonymizer(unit)
    admit_request(anonymizer, prompt)
    row = np.zeros(1, np.int32)
    if drafted and output:
        events = [Sampled(row, row + 1, row + len(output), int32_array(output))]
    else:
        events = [Sampled(row, row + 1, None, int32_array([token])) for token in output]
    hidden = np.concatenate(
        [int32_array([]), *(anonymizer.anonymize_samples(event) for event in events)]
    )
    assert (
        hidden.tolist()
        == anonymizer.anonymize_prompt(int32_array(prompt + output), "")[0][len(prompt) :].tolist()
    )


def test_a_token_that_ends_its_request_is_named_after_the_stop_id_and_an_early_one_is_not() -> None:
    anonymizer = make_anonymizer(4)
    admit_request(anonymizer, [5, 5, 5], stop_ids=(9, 7), min_tokens=2)
    row = np.zeros(1, np.int32)
    hidden = [
        int(anonymizer.anonymize_samples(Sampled(row, row + 1, None, int32_array([token])))[0])
        for token in (7, 7, 9)
    ]
    # the page's last token, under its name although it is a stop id
    assert hidden[0] not in (0, STOP, STOP + 1)
    assert hidden[1:] == [STOP + 1, STOP]


def test_late_news_of_a_row_that_is_gone_counts_for_nothing() -> None:
    anonymizer = make_anonymizer(1)
    admit_request(anonymizer, [5])
    row = np.zeros(1, np.int32)
    assert anonymizer.anonymize_samples(
        Sampled(row, row + 99, None, int32_array([3]))
    ).tolist() == [0]
    assert (
        anonymizer.anonymize_samples(Sampled(row, row + 1, None, int32_array([3]))).tolist()
        == anonymizer.anonymize_prompt(int32_array([5, 3]), "")[0][1:].tolist()
    )


def test_another_recording_has_other_names() -> None:
    tokens = int32_array(list(range(64)))
    one, other = (
        make_anonymizer(4, secret).anonymize_prompt(tokens, "")[0]
        for secret in (b"a" * 32, b"b" * 32)
    )
    used = one > 0
    assert used.sum() == 32 and (one[used] != other[used]).all()


def test_users_and_adapters_of_one_name_are_told_apart_and_no_name_stays_none() -> None:
    anonymizer = make_anonymizer(4)
    names = []
    for user, adapter in (("x", "x"), ("x", ""), ("", "y")):
        event = anonymizer.anonymize_event(
            Arrived(toy_request("a", [1, 2], user=user, adapter=adapter, extra_args={"a": "text"}))
        )
        assert isinstance(event, Arrived) and event.request.extra_args is None
        names.append((event.request.user, event.request.adapter))
    (one, other), (again, nothing), (nobody, third) = names
    assert one == again and len({one, other, third, "x", "y"}) == 5
    assert (nobody, nothing) == ("", "")


@pytest.mark.parametrize("prompts", [False, True])
def test_no_token_of_a_prompt_is_in_a_recording_unless_asked_for(
    prompts: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.recording"
    arrivals = make_requests(40)
    record_run(path, make_run_limits(), arrivals, 200, prompts=prompts)
    recording = read_recording(path)
    arrived = {}
    sampled: list[int] = []
    for recorded in recording.read_steps():
        for event in recorded.events:
            match event:
                case Arrived(one):
                    arrived[one.id] = one
                case Sampled():
                    sampled += event.tokens.tolist()
    assert recording.header["tokens"] == ("ids" if prompts else "page names")
    assert len(arrived) > 10
    for one in arrivals:
        if one.id not in arrived:
            continue
        found = arrived[one.id]
        assert (found.prompt.tolist() == one.prompt.tolist()) == prompts
        assert (found.stop_ids == one.stop_ids) == prompts
        if not prompts:
            pairs = set(zip(one.prompt.tolist(), found.prompt.tolist(), strict=True))
            inner = [position for position in range(len(one.prompt)) if position % 8 < 6]
            assert not found.prompt[inner].any()
            assert not any(real == written for real, written in pairs if written)
    users = {(one.user, arrived[one.id].user) for one in arrivals if one.id in arrived}
    assert len(users) == len(dict(users)) == len({written for _, written in users}) == 3
    assert all((real == written) == prompts for real, written in users)
    if not prompts:
        # the vocabulary has 1000 tokens, names 2**30
        small = [token for token in sampled if 0 < token < 1000]
        assert len(small) <= 2 and max(sampled) >= STOP
