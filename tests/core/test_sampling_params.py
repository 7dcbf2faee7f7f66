"""Sampling parameters: every limit at its edge and one past it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import pickle
import time
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock import sampling_checks as limits
from headstock import structured_outputs as forms
from headstock.errors import NotSupported, RequestError
from headstock.sampling_params import SamplingParams
from headstock.structured_outputs import StructuredOutputsParams

INT64 = 1 << 63


def nested(depth: int) -> dict[str, Any]:
    """A schema that is nested so deep."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return {"items": schema}


EDGES: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, 128], [0, 129, 1.0]),
    ("temperature", [0, 2.0], [-0.001, 2.001]),
    ("top_p", [1e-9, 1], [0, 1.0001]),
    ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31, 1.5]),
    ("min_p", [0, 1], [-0.001, 1.001]),
    ("presence_penalty", [-2, 2], [-2.01, 2.01]),
    ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
    ("repetition_penalty", [0.01, 100.0], [0, -1, 0.009, 100.1]),
    ("seed", [None, -INT64, INT64 - 1], [-INT64 - 1, INT64, 0.5]),
    ("stop", [None, "x", ["x" * 256] * 16], ["", "x" * 257, ["x"] * 17, [1], 5]),
    ("stop_token_ids", [None, [0], [2**31 - 1] * 128], [[-1], [2**31], [0] * 129, ["0"], "12", 3]),
    ("max_tokens", [None, 1, 2**31 - 1], [0, -1, 2**31, 1.0]),
    ("min_tokens", [0, 100], [-1, 101]),
    ("logprobs", [None, 0, 20], [-1, 21]),
    ("prompt_logprobs", [None, 0, 20], [-1, 21]),
    ("logit_bias", [None, {}, {0: -100, "7": 100.0}, dict.fromkeys(range(1024), 1.0)],
     [{0: -100.1}, {0: 100.1}, {-1: 0}, {"x": 0}, dict.fromkeys(range(1025), 1.0), [1]]),
    ("allowed_token_ids", [None, [0]], [[], [-1], [True]]),
    ("user", [None, "", "x", "x" * 512], ["x" * 513, 5, "\ud800"]),
    ("extra_args",
     [None, {}, {"a": [1] * 9999}, {"a": [None, True, 1.5, "x", {"b": [INT64 - 1, -INT64]}]}],
     [5, [], {1: 2}, {"a": INT64}, {"a": math.inf}, {"a": {1: 2}}, {"a": (1,)}, {"a": {"b": {1}}},
      dict.fromkeys(map(str, range(65)), 1), {"a": [[1] * 4999] * 2}]),
    ("structured_outputs",
     [None, StructuredOutputsParams(regex="a+"), {"json_object": True}, {"json": True},
      {"json": '{"type": "object"}'}, {"json": {"a": "x" * (forms.MAX_SCHEMA_BYTES - 10)}},
      {"json": nested(forms.MAX_SCHEMA_DEPTH)}, {"regex": "é" * (forms.MAX_REGEX_BYTES // 2)},
      {"choice": ["x"] * forms.MAX_CHOICES}, {"grammar": "x" * forms.MAX_SCHEMA_BYTES}],
     ["x", 5, {}, {"json": "{"}, {"json": "[1]"}, {"json": 5}, {"json": {"a": {1}}},
      {"json": {"a": math.nan}}, {"json": {"a": "x" * forms.MAX_SCHEMA_BYTES}},
      {"json": nested(forms.MAX_SCHEMA_DEPTH + 1)}, {"json": nested(5000)},
      {"json": '{"a":' * 100_000 + "1" + "}" * 100_000}, {"json": {"a": "\ud800"}},
      {"json": {"a": [1] * forms.MAX_SCHEMA_BYTES}}, {"json": " " * 10 * forms.MAX_SCHEMA_BYTES},
      {"regex": ""}, {"regex": 5}, {"regex": "é" * (forms.MAX_REGEX_BYTES // 2) + "a"},
      {"regex": "\ud800"}, {"choice": []}, {"choice": "ab"}, {"choice": [""]}, {"choice": [1]},
      {"choice": ["x"] * (forms.MAX_CHOICES + 1)}, {"choice": ["x" * (forms.MAX_SCHEMA_BYTES)]},
      {"grammar": "x" * (forms.MAX_SCHEMA_BYTES + 1)}, {"json_object": "yes"},
      {"json_object": False}, {"regex": "a", "choice": ["a"]}, {"schema": {}}, {"jsn": {}}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inside", "outside"), EDGES, ids=[name for name, _, _ in EDGES])
def test_each_limit_at_its_edge_and_one_past_it(
    name: str, inside: list[Any], outside: list[Any]
) -> None:
    for value in inside:
        SamplingParams(**{name: value})
    for value in outside:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.parameter == name
        assert str(caught.value).startswith(name) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_tokens": 10**12},
            "max_tokens: expected an integer from 1 to 2147483647, or none, got 1000000000000",
        ),
        (
            {"min_tokens": 2**31},
            "min_tokens: expected an integer from 0 to 2147483647, got 2147483648",
        ),
        (
            {"top_k": 2**31},
            "top_k: expected an integer from 1 to 2147483647, or 0 or -1 for off, got 2147483648",
        ),
        ({"stop": [""]}, "stop: expected strings of 1 to 256 characters, got an empty string"),
        ({"stop": ["x" * 257]}, "stop: expected strings of 1 to 256 characters, got one of 257"),
        (
            {"temprature": 1},
            "no sampling parameter is called 'temprature'; did you mean temperature?",
        ),
        (
            {"max_new_tokens": 1},
            "no sampling parameter is called 'max_new_tokens'; did you mean max_tokens?",
        ),
    ],
)
def test_messages_name_both_limits_and_near_names(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_an_unknown_parameter_like_no_other_is_answered_with_those_there_are() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(bogus=1)  # type: ignore[call-arg]
    assert str(caught.value).startswith(
        "no sampling parameter is called 'bogus'; known are n, temperature, top_p, "
    )
    assert caught.value.parameter == "bogus"
    with pytest.raises(
        RequestError, match=r"^SamplingParams takes keywords, such as max_tokens=20; got float 0.7$"
    ):
        SamplingParams(0.7)  # type: ignore[misc]


def test_the_signature_shows_every_parameter_with_its_default() -> None:
    parameters = inspect.signature(SamplingParams).parameters.values()
    assert {parameter.name: parameter.default for parameter in parameters} == {
        field.name: field.default for field in attrs.fields(SamplingParams)
    }
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


def test_parameters_survive_copies_and_pickles() -> None:
    params = SamplingParams(n=2, stop="x", logit_bias={1: 2.0})
    assert (
        pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == copy.copy(params) == params
    )


def test_every_field_with_a_limit_has_a_row() -> None:
    parameters = {name for name, _, _ in EDGES}
    assert parameters | {"ignore_eos", "skip_special_tokens", "include_stop_str_in_output"} == {
        field.name for field in SamplingParams.__attrs_attrs__
    }


NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
WHOLE = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]


@pytest.mark.feature("H13")
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, True, "1", None, [], 10**400],
    ids=lambda value: str(value)[:8],
)
def test_no_number_parameter_takes_what_is_no_finite_number(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [True, math.nan, "1", 10**400], ids=lambda value: str(value)[:8])
def test_no_whole_parameter_takes_bools_or_numbers_of_other_kinds(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.feature("H11")
def test_temperature_outside_0_to_2_is_refused_with_the_value() -> None:
    with pytest.raises(
        RequestError, match=r"^temperature: expected a number between 0 and 2, got 2\.5$"
    ):
        SamplingParams(temperature=2.5)


@pytest.mark.feature("H12")
def test_top_p_outside_0_to_1_is_refused_with_the_value() -> None:
    with pytest.raises(
        RequestError, match=r"^top_p: expected a number above 0 and at most 1, got 0$"
    ):
        SamplingParams(top_p=0)


@pytest.mark.parametrize(
    "name", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"]
)
def test_switches_take_only_true_and_false(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: 1})  # type: ignore[arg-type]


@given(st.text(min_size=65, max_size=300))
def test_a_shown_value_is_cut_and_stays_on_one_line(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature=value)  # type: ignore[arg-type]
    assert (
        len(str(caught.value)) <= len("temperature: expected a number between 0 and 2, got ") + 64
    )
    assert len(str(caught.value).splitlines()) == 1


def test_min_tokens_is_bounded_by_max_tokens_unless_that_is_open() -> None:
    SamplingParams(max_tokens=None, min_tokens=5000)
    with pytest.raises(
        RequestError, match=r"^min_tokens: expected max_tokens \(3\) or less, got 4$"
    ):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_answers_are_seeded_one_after_another_and_stay_int64() -> None:
    params = SamplingParams(n=3, prompt_logprobs=2)
    assert [params.for_answer(i, 7).seed for i in range(3)] == [7, 8, 9]
    assert params.for_answer(1, INT64 - 1).seed == -INT64
    assert [params.for_answer(i, 0).prompt_logprobs for i in range(2)] == [2, None]
    assert params.for_answer(2, 0).n == 1


def test_replace_suggests_the_parameter_that_was_meant() -> None:
    assert SamplingParams().replace({"top_k": 3, "stop": "x"}) == SamplingParams(
        top_k=3, stop=("x",)
    )
    with pytest.raises(
        RequestError, match="no sampling parameter is called 'temprature'; did you mean temperature"
    ):
        SamplingParams().replace({"temprature": 1})


def test_ids_that_are_allowed_twice_count_once() -> None:
    assert SamplingParams(allowed_token_ids=[7, 5, 7]).allowed_token_ids == (7, 5)
    with pytest.raises(RequestError, match="allowed_token_ids: expected token ids of 0 to"):
        SamplingParams(allowed_token_ids=[1, "1"])  # type: ignore[list-item]


@pytest.mark.feature("W10")
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {str(i): 1 for i in range(400_000)}),
        ("stop", ["a"] * 3_000_000),
        ("extra_args", {"a": [[]] * 500_000}),
        ("structured_outputs", {"json": {"enum": [1] * 2_000_000}}),
        ("allowed_token_ids", list(range(1000)) * 262),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_value_of_megabytes_is_checked_in_milliseconds(name: str, value: Any) -> None:
    began = time.process_time()
    with contextlib.suppress(RequestError):
        SamplingParams(**{name: value})
    assert time.process_time() - began < 0.1


def test_limits_are_documented_values() -> None:
    assert (limits.MAX_N, limits.MAX_STOP_STRINGS, limits.MAX_STOP_LENGTH) == (128, 16, 256)
    assert hash(SamplingParams(logit_bias={1: 2.0})) == hash(SamplingParams(logit_bias={1: 2.0}))


def test_a_field_may_be_set_and_is_checked_and_converted() -> None:
    params = SamplingParams(max_tokens=5)
    params.temperature, params.stop, params.logit_bias = 0.5, "x", {"5": 1.0}
    assert params == SamplingParams(max_tokens=5, temperature=0.5, stop=("x",), logit_bias={5: 1.0})
    with pytest.raises(RequestError, match="temperature: expected a number between 0 and 2"):
        params.temperature = 3
    assert params.temperature == 0.5
    with pytest.raises(AttributeError):
        params.max_token = 3  # type: ignore[attr-defined]
    params.min_tokens = 9  # fine until it is used: max_tokens may be set next
    with pytest.raises(RequestError, match=r"min_tokens: expected max_tokens \(5\) or less"):
        params.replace({})


@pytest.mark.parametrize("bias", [None, {5: 1.0}])
def test_a_checked_copy_keeps_its_values_and_refuses_what_has_become_invalid(
    bias: dict[int, float] | None,
) -> None:
    params = SamplingParams(max_tokens=5, logit_bias=bias)
    copied, before = params.copy_checked(), repr(params)
    assert copied == params and copied is not params
    params.temperature = 0.5
    if params.logit_bias is not None:
        params.logit_bias[6] = 2.0
    assert repr(copied) == before != repr(params)
    params.min_tokens = 9
    with pytest.raises(RequestError, match=r"min_tokens: expected max_tokens \(5\) or less"):
        params.copy_checked()


def test_a_checked_copy_refuses_a_bias_that_was_changed_in_place() -> None:
    params = SamplingParams(logit_bias={5: 1.0})
    assert params.logit_bias is not None
    params.logit_bias[5] = 1000.0
    with pytest.raises(RequestError, match="logit_bias"):
        params.copy_checked()


def test_parameters_of_vllm_that_are_not_here_say_so() -> None:
    with pytest.raises(NotSupported, match="best_of is not supported; ask for n answers") as caught:
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    assert caught.value.parameter == "best_of" and caught.value.exit_code == 2
    with pytest.raises(NotSupported, match="response_format is not supported; give structured_out"):
        SamplingParams().replace({"response_format": {"type": "json_object"}})
    with pytest.raises(NotSupported, match="bad_words is not supported"):
        SamplingParams().replace({"bad_words": ["x"]})
