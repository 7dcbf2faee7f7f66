"""Names of vLLM's LLM that headstock lacks, each with what to do in its place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headstock.errors import NotSupported, RequestError, shorten
from headstock.text.conversation import CONVERSATION_OPTIONS

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "beam_search": "sample n answers with logprobs, and choose by cumulative_logprob",
        "encode": "LLM.embed returns a vector for each prompt",
        **dict.fromkeys(("classify", "reward"), "LLM generates text and embeds it"),
        "score": "headstock serve answers /v1/score and /v1/rerank; for the likelihood of a text, "
        "give prompt_logprobs to SamplingParams",
        **dict.fromkeys(("sleep", "wake_up"), "close the LLM, and make a new one"),
        **dict.fromkeys(
            ("collective_rpc", "apply_model", "llm_engine"),
            "parts of the engine are plugins: docs/plugins.md",
        ),
        **dict.fromkeys(
            ("start_profile", "stop_profile"), "headstock bench --profile FILE shows a step"
        ),
        "get_metrics": "RequestOutput.metrics has the times of a request, a server /metrics",
        "set_tokenizer": "the tokenizer is the one in the model's directory",
    }
)
"""Method or attribute -> what to do in its place."""

OPTIONS: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "lora_request": ((None,), "LoRA adapters are not supported; merge one into its model"),
        "prompt_adapter_request": ((None,), "prompt adapters are not supported"),
        "mm_processor_kwargs": ((None,), "prompts are text or token ids"),
        "tokenization_kwargs": ((None, {}), "give token ids to tokenize otherwise"),
        "prompt_token_ids": ((None,), 'a prompt of ids is {"prompt_token_ids": [...]}'),
        "chat_template_content_format": (
            ("auto", "string", "openai"),
            "content is text, or a list of text parts",
        ),
    }
)
"""Keyword of a method -> the values that change nothing, and what to do in its place."""


def explain_missing_method(name: str) -> AttributeError:
    """The error for an attribute that LLM lacks: also a NotSupported for one of vLLM's."""
    if name in METHODS:
        return _MissingMethod(f"LLM.{name} is not supported; {METHODS[name]}")
    return AttributeError(f"'LLM' object has no attribute {name!r}")


class _MissingMethod(NotSupported, AttributeError):
    """Both, so that `hasattr` and `getattr` with a default work as for any other name."""


def drop_foreign_options(options: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The options without those of vLLM's that change nothing.

    raises: NotSupported for one that does, RequestError for one that `method` cannot have
    """
    for name, value in options.items():
        if name in OPTIONS:
            values, advice = OPTIONS[name]
            if value not in values:
                raise NotSupported(f"{name}={shorten(value)} is not supported; {advice}", name)
        elif method == "generate":
            hint = "give it to LLM.chat" if name in CONVERSATION_OPTIONS else "leave it out"
            raise RequestError(f"generate has no keyword {shorten(name)}; {hint}", shorten(name))
    return {name: value for name, value in options.items() if name not in OPTIONS}
