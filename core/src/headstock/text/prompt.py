"""Prompts in every form users give them, as checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from attrs import evolve, frozen

from headstock.errors import RequestError, shown
from headstock.sampling_params import MAX_TOKEN_ID, is_int
from headstock.text.tokenizer import Tokenizer


@frozen
class Prompt:
    """Token ids, and the text they came from if there was one.

    Prompts of different `cache_salt` never share what is cached of them.
    """

    text: str | None
    tokens: tuple[int, ...]
    cache_salt: str = ""


PromptInput = str | Sequence[int] | Mapping[str, Any] | Prompt
"""Text, token ids, one of {"prompt": text} and {"prompt_token_ids": ids}, or what `LLM.chat_prompt` made.

A mapping may have a "cache_salt" too: a string, with which prompts share nothing with those of another one.
"""

MAX_SALT: Final = 256  # characters


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """The prompts, one or several, as a list; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    if prompts and all(is_int(token, -MAX_TOKEN_ID, MAX_TOKEN_ID) for token in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[PromptInput]", prompts))


def as_prompt(given: PromptInput, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> Prompt:
    """The prompt's ids.   raises: RequestError"""
    if isinstance(given, Prompt):
        return given
    salt = None
    if isinstance(given, Mapping):
        rest = dict(given)
        salt = rest.pop("cache_salt", None)
        if len(rest) != 1 or not rest.keys() <= {"prompt", "prompt_token_ids"}:
            raise RequestError(
                "a prompt given as a mapping must have one of prompt and prompt_token_ids, and may have a cache_salt",
                "prompt",
            )
        (given,) = rest.values()
    if isinstance(given, str):
        if not given:
            raise RequestError("prompt is empty; give it at least one character", "prompt")
        tokens = tokenizer.encode(given, add_special_tokens=add_special_tokens)
        return salted(Prompt(given, tuple(tokens)), salt)
    if not isinstance(given, list | tuple):
        raise RequestError(f"a prompt must be text or a list of token ids, got {shown(given)}", "prompt")
    return salted(Prompt(None, tuple(given)), salt)


def salted(prompt: Prompt, salt: Any) -> Prompt:
    """The prompt with that cache_salt; None leaves it as it is.   raises: RequestError"""
    if salt is None:
        return prompt
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT:
        raise RequestError(
            f"cache_salt must be a string of 1 to {MAX_SALT} characters, got {shown(salt)}", "cache_salt"
        )
    return evolve(prompt, cache_salt=salt)


def check_prompt(tokens: Sequence[int], *, vocab: int, max_seq_len: int) -> None:
    """Raise RequestError unless `tokens` are ids of a model with `vocab` scores and leave room for one token more."""
    if not tokens:
        raise RequestError("prompt is empty; give it at least one token", "prompt")
    if len(tokens) >= max_seq_len:
        raise RequestError(
            f"prompt has {len(tokens)} tokens, but sequences may have {max_seq_len} here, at least one of them output; "
            "shorten the prompt or raise --max-seq-len (--num-pages, where the KV pool is what limits it)",
            "prompt",
        )
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab:
        return
    for token in tokens:  # one of them is at fault, or all are integers of another type
        if not is_int(token, 0, vocab - 1):
            raise RequestError(f"prompt token ids must be integers from 0 to {vocab - 1}, got {shown(token)}", "prompt")


def check_ids(tokens: Sequence[int], parameter: str, vocab: int) -> None:
    """Raise RequestError when a token id of sampling parameter `parameter` is none of the model's."""
    for token in tokens:
        if token >= vocab:
            raise RequestError(f"{parameter} must hold token ids from 0 to {vocab - 1}, got {token}", parameter)
