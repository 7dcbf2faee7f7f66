"""What users of LLM write, and what they must not, for mypy: `nox -s types` checks this file.

`assert_type` fails when a result becomes Any. A `type: ignore` that nothing needs any more fails
when a parameter becomes Any.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import assert_type

from headstock import (
    LLM,
    CompletionOutput,
    EngineConfig,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def check_generate(llm: LLM) -> None:
    assert_type(llm.generate("a"), list[RequestOutput])
    llm.generate(["a", "b"], [PARAMS, PARAMS], use_tqdm=True, priority=[0, 1])
    llm.generate([1, 2, 3], PARAMS)
    llm.generate([{"prompt": "a"}, {"prompt": "b", "cache_salt": "x"}])
    llm.generate([[1, 2], {"prompt": "a"}, {"prompt_token_ids": [1], "cache_salt": "x"}])
    llm.generate(3)  # type: ignore[call-overload]
    llm.generate({"promt": "a"})  # type: ignore[call-overload]
    llm.generate("a", {"temperature": 0})
    llm.generate(["a", "b"], [{"temperature": 0}, PARAMS])
    llm.generate("a", use_tqdm="yes")  # type: ignore[call-overload]
    llm.generate("a", priority=1)  # type: ignore[call-overload]


def check_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert_type(llm.chat(messages, PARAMS), list[RequestOutput])
    llm.chat([messages, messages], chat_template="{{ messages }}")
    llm.chat("a")  # type: ignore[arg-type]
    llm.chat(messages, chat_template=3)  # type: ignore[arg-type]


def check_streams(llm: LLM) -> None:
    assert_type(llm.stream("a", PARAMS, priority=1), Iterator[RequestOutput])
    assert_type(llm.astream("a", PARAMS), AsyncIterator[RequestOutput])
    llm.stream(["a"])  # type: ignore[list-item]
    llm.stream("a", [PARAMS])  # type: ignore[arg-type]
    llm.astream(3)  # type: ignore[arg-type]


async def check_generate_async(llm: LLM) -> None:
    assert_type(await llm.generate_async("a", PARAMS), RequestOutput)
    await llm.generate_async("a", priority="high")  # type: ignore[arg-type]


def check_outputs(output: RequestOutput) -> None:
    assert_type(output.metrics, RequestMetrics)
    assert_type(output.metrics.ttft, float | None)
    assert_type(output.outputs, list[CompletionOutput])
    assert_type(output.outputs[0].text, str)
    assert_type(output.outputs[0].token_ids, list[int])
    assert_type(output.outputs[0].logprobs, list[dict[int, Logprob]] | None)


def check_construction(names: Sequence[str]) -> None:
    with LLM("demo", page_size=16, opt=names, attn="sdpa", num_pages=None) as llm:
        assert_type(llm, LLM)
    LLM(config=EngineConfig())
    LLM(3)  # type: ignore[arg-type]
    LLM("demo", page_size=object())  # type: ignore[arg-type]
    LLM("demo", start=print)  # type: ignore[arg-type]
