"""Answers of the demo model: each one follows its schema, in every way an engine runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from json_schemas import draw_schema
from jsonschema import Draft202012Validator, FormatChecker
from often import often

from headstock import LLM, RequestError, RequestOutput, SamplingParams

PROMPTS = ("Once upon a time", "12 + 30 =", "Describe the city as JSON: ")


def answer_schemas(seeds: range, **settings: Any) -> list[RequestOutput]:
    """An answer for each schema, every third one greedy, beside requests without a grammar."""
    prompts, params = [], []
    for seed in seeds:
        schema = draw_schema(seed)
        warm = {} if seed % 3 == 0 else {"temperature": 1.0, "seed": seed}
        prompts.append(PROMPTS[seed % len(PROMPTS)])
        grammar = {"structured_outputs": {"json": schema}}
        params.append(SamplingParams(**{"temperature": 0.0, "max_tokens": 400} | warm | grammar))
    others = ["12 + 30 =", "47 + 38 ="]
    plain = [SamplingParams(temperature=0.0, max_tokens=8)] * len(others)
    with LLM("demo", num_pages=1024, max_running_requests=32, **settings) as llm:
        found = llm.generate([*prompts, *others], [*params, *plain])
    assert [each.outputs[0].text for each in found[len(prompts) :]] == [" 42.", " 85."]
    return found[: len(prompts)]


def check_answers(seeds: range, outputs: list[RequestOutput]) -> None:
    """Raise AssertionError unless each answer is whole and follows its schema."""
    for seed, output in zip(seeds, outputs, strict=True):
        schema, answer = draw_schema(seed), output.outputs[0]
        assert answer.finish_reason == "stop", (seed, schema, answer)
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema, format_checker=FormatChecker())
        errors = list(validator.iter_errors(json.loads(answer.text)))
        assert not errors, (seed, schema, answer.text, errors)


@pytest.mark.feature("R4")
def test_answers_follow_random_schemas() -> None:
    seeds = range(12)
    check_answers(seeds, answer_schemas(seeds, proposer="ngram"))


@pytest.mark.feature("R4")
@pytest.mark.full
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("proposer", ["off", "ngram"])
def test_two_hundred_random_schemas(proposer: str, overlap: bool) -> None:
    seeds = range(200)
    check_answers(seeds, answer_schemas(seeds, proposer=proposer, overlap=overlap))


@pytest.mark.parametrize("proposer", often(1, ["ngram", "off"]))
def test_a_grammar_begins_behind_what_the_model_thinks(proposer: str) -> None:
    schema = draw_schema(3)
    with LLM("demo", num_pages=256, proposer=proposer) as llm:
        end = llm.get_tokenizer().convert_tokens_to_ids(".")
        grammars: list[dict[str, Any]] = [
            {"json": schema},
            {"json": schema, "after_reasoning": {"end": end}},
        ]
        params = [
            SamplingParams(temperature=0.0, max_tokens=400, structured_outputs=grammar)  # type: ignore[arg-type]
            for grammar in grammars
        ]
        outputs = llm.generate([PROMPTS[0]] * len(params), params)
    at_once, after = (each.outputs[0] for each in outputs)

    thought, _, answer = after.text.partition(".")
    assert thought and after.token_ids.count(end) >= 1 and not thought.startswith(at_once.text[:1])
    for text in (at_once.text, answer):
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_pages=256, max_running_requests=8) as one:
        yield one


RULED = SamplingParams(max_tokens=4, temperature=0.0, structured_outputs={"regex": "[ab]+"})  # type: ignore[arg-type]
REFUSED = [
    (RULED.replace({"structured_outputs": {"regex": "("}}), "this regex cannot be served"),
    (RULED.replace({"structured_outputs": {"json": {"$ref": "#"}}}), "refers to itself alone"),
    (RULED.replace({"ignore_eos": True}), "leave ignore_eos out"),
]


@pytest.mark.parametrize(("params", "reason"), REFUSED)
def test_a_refused_grammar_raises_before_anything_runs(
    llm: LLM, params: SamplingParams, reason: str
) -> None:
    before = llm._session.engine.stats().prompt_tokens
    with pytest.raises(RequestError, match=rf"prompts\[1\]: .*{reason}"):
        llm.generate(["a", "b"], [RULED, params])
    messages = [{"role": "user", "content": "Who?"}]
    with pytest.raises(RequestError, match=rf"prompts\[1\]: .*{reason}"):
        llm.chat([messages, messages], [RULED, params])
    with pytest.raises(RequestError, match=reason):
        llm.stream("a", params)
    with pytest.raises(RequestError, match=reason):
        llm.stream_chat(messages, params)
    for prompt in ("a", [5, 6]):
        with pytest.raises(RequestError, match=reason):
            asyncio.run(llm.generate_async(prompt, params))

    assert llm._session.engine.stats().prompt_tokens == before
    (output,) = llm.generate("a", RULED)
    assert set(output.outputs[0].text) <= set("ab")


def test_the_advice_about_an_answer_that_ignores_its_end_leads_to_an_answer(llm: LLM) -> None:
    with pytest.raises(RequestError, match="leave ignore_eos out"):
        llm.generate("a", RULED.replace({"ignore_eos": True}))
    (output,) = llm.generate("a", RULED.replace({"ignore_eos": False}))
    assert output.outputs[0].error is None and output.outputs[0].text
