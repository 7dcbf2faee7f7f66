"""Convert a body to sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headstock import RequestError, SamplingParams
from headstock_openai_server.api.errors import ApiError, refuse
from headstock_openai_server.api.schema import ChatBody, CompletionBody, SamplingBody
from headstock_openai_server.api.structured_outputs import name_structure, read_structure

COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; chats may use the whole context."""

PASSED_ON = (
    *("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"),
    *("stop", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids"),
    *("prompt_logprobs", "user", "extra_args"),
)
"""Fields that mean what the sampling parameter of their name means."""


def make_chat_params(
    body: ChatBody, defaults: SamplingParams, most_n: int, max_tokens: int | None = None
) -> SamplingParams:
    """The parameters of a chat; `max_tokens` is the server's own default.

    raises: ApiError, RequestError
    """
    if body.top_logprobs and not body.logprobs:
        raise refuse("top_logprobs needs logprobs: true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise refuse("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    for given in (body.max_completion_tokens, body.max_tokens):
        max_tokens = max_tokens if given is None else given
    changes: dict[str, Any] = {"max_tokens": max_tokens}
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    return _make_params(body, defaults, most_n, changes)


def make_completion_params(
    body: CompletionBody, defaults: SamplingParams, most_n: int, max_tokens: int | None = None
) -> SamplingParams:
    """The parameters of a completion; `max_tokens` is the server's own default.

    raises: ApiError, RequestError
    """
    if body.max_tokens is not None:
        max_tokens = body.max_tokens
    elif max_tokens is None:
        max_tokens = COMPLETION_TOKENS
    # Only the prompt's log-probabilities are requested: one token is generated and dropped.
    if max_tokens == 0 and body.echo:
        max_tokens = 1
    changes: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return _make_params(body, defaults, most_n, changes)


def _make_params(
    body: SamplingBody, defaults: SamplingParams, most_n: int, changes: Mapping[str, Any]
) -> SamplingParams:
    if body.n is not None and body.n > most_n:
        raise refuse(f"n is {body.n}; at most {most_n} answers are given", "n")
    if body.stream and body.prompt_logprobs is not None:
        raise refuse("prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")
    given = {name: getattr(body, name) for name in PASSED_ON}
    given["structured_outputs"] = read_structure(body)
    return defaults.replace(
        {name: value for name, value in given.items() if value is not None} | dict(changes)
    )


def client_names(body: SamplingBody) -> dict[str, str]:
    """Parameter -> the field in which this client gave it, if the names differ."""
    names = {"prompts": "prompt"}
    if body.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    names["structured_outputs"] = name_structure(body)
    if isinstance(body, ChatBody):
        names |= {"logprobs": "top_logprobs", "prompt": "messages"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        is_forced = body.tool_choice not in (None, "none", "auto")
        is_strict = any(tool.function.strict for tool in body.tools or ())
        if is_forced and read_structure(body) is None:
            names["structured_outputs"] = "tool_choice"  # the structure of tool calls
        elif is_strict and read_structure(body) is None:
            names["structured_outputs"] = "tools"
    return names


@contextmanager
def named_for_client(body: SamplingBody) -> Iterator[None]:
    """Make RequestErrors of this block name the client's fields."""
    with name_fields(client_names(body)):
        yield


@contextmanager
def name_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors of this block name the request's field, which `names` maps from the parameter.

    Their texts begin with the field if its name differs from the parameter's.
    """
    try:
        yield
    except ApiError as error:
        error.param = names.get(error.param or "", error.param)
        raise
    except RequestError as error:
        field = names.get(error.parameter or "", error.parameter)
        if field == error.parameter:
            raise
        rest = str(error).removeprefix(f"{error.parameter}: ")
        raise type(error)(f"{field}: {rest}", field) from error
