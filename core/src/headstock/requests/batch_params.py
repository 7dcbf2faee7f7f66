"""Parameters and priorities of several prompts: one for all, or a list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from headstock.errors import RequestError, describe_type
from headstock.sampling_params import SamplingParams

RequestParams = SamplingParams | Mapping[str, Any] | None
"""Parameters of a request; a mapping is `SamplingParams(**mapping)`, None the model's defaults."""

ParamsInput = RequestParams | Sequence[RequestParams]
"""Parameters of all prompts, or of each."""


def list_priorities(priorities: Sequence[int] | None, count: int) -> Sequence[int]:
    """The priority of each of `count` prompts, 0 by default.   raises: RequestError"""
    if priorities is None:
        return [0] * count
    if not isinstance(priorities, list | tuple) or len(priorities) != count:
        is_list = isinstance(priorities, list | tuple)
        got = f"{len(priorities)}" if is_list else describe_type(priorities)
        raise RequestError(
            f"priority: expected a list with a number for each prompt ({count}), got {got}",
            "priority",
        )
    return priorities


def list_params(params: ParamsInput, count: int) -> list[RequestParams]:
    """The parameters of each of `count` prompts.   raises: RequestError"""
    if not isinstance(params, list | tuple):  # `process` refuses other types
        return [cast("RequestParams", params)] * count
    if len(params) != count:
        raise RequestError(
            f"expected one sampling_params or one for each prompt ({count}), got {len(params)}",
            "sampling_params",
        )
    return list(params)


@contextmanager
def name_prompt_in_errors(index: int, count: int) -> Iterator[None]:
    """A RequestError that leaves this block says which of `count` prompts is at fault."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"prompts[{index}]: {error}", parameter=error.parameter) from error
