"""Prompts in every form users give them, as checked token ids."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Final, NotRequired, TypedDict, TypeGuard, cast

from attrs import evolve, frozen

from headstock.errors import RequestError, describe_type, shorten
from headstock.sampling_checks import MAX_TOKEN_ID, is_int
from headstock.spi.arrays import Ints
from headstock.text.tokenizer import Tokenizer


@frozen
class Prompt:
    """Token ids, and the text that they came from, if there was one.

    Prompts of different `cache_salt` never share cached pages. Where the tokens are an array of C
    integers, only their range is still to be checked.
    """

    # Not a tuple where headstock makes it: of 557,000 ids in 256 prompts, copies would take 3 ms,
    # and the garbage collector as long to look at them.
    text: str | None
    tokens: Sequence[int]
    cache_salt: str = ""

    @cached_property
    def ids(self) -> Ints:
        """The tokens as `pack_tokens` gives them.   raises: struct.error"""
        return pack_tokens(self.tokens)


class TextPrompt(TypedDict):
    """A prompt as text; `cache_salt` as in Prompt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `cache_salt` as in Prompt."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Prompt
"""What users give as a prompt. The names are vLLM's."""

MAX_SALT_LENGTH: Final = 256  # characters
PROBED_CHARACTERS: Final = 8
"""Characters for each token that a text may have, from which its length is judged by a part of it:
most tokens have four.
"""
MAX_CUT: Final = 1 << 18
"""Tokens of a text from which only the last ones are kept: these take a second to find."""
KEY_FORMS: Final = {"prompt": "text", "prompt_token_ids": "a list of token ids"}
"""What the value of each key of a prompt must be."""


def list_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """The prompts, one or several, as a list. A list of integers is one prompt.

    raises: RequestError
    """
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    # Bytes are a sequence of integers too, and would pass as token ids.
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        forms = (
            "text, a list of token ids, a mapping with prompt or prompt_token_ids, or a list "
            "of such"
        )
        raise RequestError(f"prompts: expected {forms}, got {describe_type(prompts)}", "prompts")
    items = cast("Sequence[object]", prompts)
    if items and all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[PromptType]", prompts))


def instruct_prompt(
    prompt: PromptType, instruction: str, name: str | None, *, lowercase: bool = False
) -> PromptType:
    """The prompt with an instruction before its text; token ids stay as they are.

    name: of the instruction, if the caller has asked for it
    lowercase: whether the text and its instruction become small letters
    raises: RequestError where there is no text
    """
    if not instruction and not lowercase:
        return prompt
    given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if isinstance(given, str):
        text = instruction + given
        text = text.lower() if lowercase else text
        if isinstance(prompt, str):
            return text
        return cast("TextPrompt", {**cast("TextPrompt", prompt), "prompt": text})
    if instruction and name is not None:
        raise RequestError(
            "prompt_name: expected a prompt as text, got token ids; put the instruction's ids "
            "before them",
            "prompt_name",
        )
    return prompt


def tokenize_prompt(
    prompt: PromptType,
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool = True,
    max_seq_len: int | None = None,
    length_hint: str = "",
) -> Prompt:
    """The prompt as token ids; a Prompt stays as it is.

    raises: RequestError, with `max_seq_len` also for a text that has far more tokens
    """
    if isinstance(prompt, Prompt):
        return prompt
    prompt = read_prompt(prompt)
    content = prompt.text
    if content is not None:
        if max_seq_len is not None and is_far_longer(content, tokenizer, max_seq_len):
            raise RequestError(
                f"prompt has {len(content)} characters, and far more tokens than sequences may "
                f"have here ({max_seq_len}); shorten the prompt{length_hint}",
                "prompt",
            )
        tokens = array("i", tokenizer.encode(content, add_special_tokens=add_special_tokens))
        return Prompt(content, tokens, prompt.cache_salt)
    return prompt


def tokenize_end(
    text: str, tokenizer: Tokenizer, num_tokens: int, *, max_seq_len: int, add_special_tokens: bool
) -> array[int]:
    """The last `num_tokens` tokens of a text, or all of fewer.

    raises: RequestError for a text that has far more than any sequence, and than MAX_CUT
    """
    # All of the text is tokenized: where it is cut, its tokens may be others up to the end.
    most = max(MAX_CUT, max_seq_len)
    if is_far_longer(text, tokenizer, most):
        raise RequestError(
            f"prompt has {len(text)} characters, and far more than {most} tokens, too many to cut; "
            "send its end alone",
            "prompt",
        )
    return array("i", tokenizer.encode(text, add_special_tokens=add_special_tokens)[-num_tokens:])


def split_prompt(prompt: object) -> tuple[str | tuple[int, ...], str]:
    """The text or the token ids of a prompt, and its salt, checked without a model.

    raises: RequestError
    """
    content = read_prompt(prompt)
    return tuple(content.tokens) if content.text is None else content.text, content.cache_salt


def read_prompt(prompt: object) -> Prompt:
    """The prompt checked without a model: a text has no tokens yet.   raises: RequestError"""
    if not isinstance(prompt, Mapping):
        return check_content(prompt, "a prompt", "text", "a list of token ids")
    rest = dict(prompt)
    salt = check_salt(rest.pop("cache_salt", None))
    if len(rest) != 1 or not rest.keys() <= KEY_FORMS.keys():
        raise RequestError(
            "prompt: expected a mapping with one of prompt and prompt_token_ids, and optionally a "
            f"cache_salt, got {' and '.join(map(shorten, rest)) or 'neither'}",
            "prompt",
        )
    ((name, value),) = rest.items()
    return evolve(check_content(value, name, KEY_FORMS[name]), cache_salt=salt)


def check_content(value: object, name: str, *forms: str) -> Prompt:
    """The text or the token ids, of a form in `forms`, as a prompt.   raises: RequestError"""
    if isinstance(value, str) and "text" in forms:
        if not value:
            raise RequestError("prompt is empty; give it at least one character", "prompt")
        check_unicode(value, "prompt")
        return Prompt(value, ())
    if isinstance(value, list | tuple) and "a list of token ids" in forms:
        return Prompt(None, check_tokens(value, MAX_TOKEN_ID + 1))
    raise RequestError(
        f"{name}: expected {' or '.join(forms)}, got {describe_type(value)}", "prompt"
    )


def check_salt(salt: object) -> str:
    """A checked cache_salt; empty for None.   raises: RequestError"""
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise RequestError(
            f"cache_salt: expected a string of 1 to {MAX_SALT_LENGTH} characters, got "
            f"{describe_type(salt)}",
            "cache_salt",
        )
    check_unicode(salt, "cache_salt")
    return salt


def check_unicode(text: str, name: str) -> None:
    """Raise RequestError when `text`, the value of parameter `name`, has no UTF-8 form."""
    # Half of a surrogate pair has none; JSON escapes and bytes on a command line can spell one.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            f"{name} holds characters that are not valid Unicode; remove them", name
        ) from None


def pack_tokens(tokens: Sequence[int]) -> Ints:
    """The token ids as an int32 array that cannot be written.

    raises: struct.error unless all are 32-bit integers
    """
    import numpy as np  # not above: the help of `headstock run` does without

    # A third of the time that numpy takes to look at each element.
    data = tokens if _is_array(tokens) else struct.pack(f"={len(tokens)}i", *tokens)
    ids = np.frombuffer(data, np.int32)
    ids.setflags(write=False)
    return ids


def check_tokens(tokens: Sequence[int], vocab: int) -> array[int]:
    """The token ids as an array of C integers.

    raises: RequestError for no tokens, or for one that is not an integer from 0 to `vocab` - 1
    """
    if not tokens:
        raise RequestError("prompt is empty; give it at least one token", "prompt")
    ints = tokens if _is_array(tokens) else _copy_plain_ints(tokens)
    if ints is not None and int(_view_unsigned(ints).max()) < vocab:
        return ints
    for token in tokens:  # one of them is at fault, or they are integers of another type
        if not is_int(token, 0, vocab - 1):
            raise RequestError(
                (
                    f"prompt token ids: expected integers from 0 to {vocab - 1}, got "
                    f"{describe_type(token)}"
                ),
                "prompt",
            )
    return array("i", tokens)


def _is_array(tokens: object) -> TypeGuard[array[int]]:
    """Whether these are C integers."""
    return isinstance(tokens, array) and tokens.typecode == "i"


def _copy_plain_ints(tokens: Sequence[int]) -> array[int] | None:
    """The tokens as C integers; None unless each is known to be an integer of 32 bits."""
    import numpy as np

    # To ask each for its type takes as long as all of this. What has no index cannot be packed, and
    # what has one without being an `int`, as a tensor has, makes the sum its own type.
    try:
        ints = array("i", struct.pack(f"={len(tokens)}i", *tokens))
        if type(sum(tokens)) is not int:
            return None
    except (struct.error, TypeError):
        return None
    # A bool is an `int` that is packed as 0 or 1; few tokens are.
    if any(type(tokens[at]) is bool for at in np.flatnonzero(_view_unsigned(ints) < 2).tolist()):
        return None
    return ints


def _view_unsigned(ints: array[int]) -> Ints:
    """The integers without their signs, so that one maximum finds negative ones too."""
    import numpy as np

    return np.frombuffer(ints, np.uint32)


def check_prompt(
    prompt: Prompt, *, vocab: int, max_seq_len: int, length_hint: str, num_outputs: int = 1
) -> None:
    """Raise RequestError unless the ids are below `vocab` and leave room for `num_outputs`.

    `length_hint` says what would allow longer sequences.
    """
    tokens = prompt.tokens
    check_tokens(tokens, vocab)
    if len(tokens) + num_outputs > max_seq_len:
        reserved = ", at least one of them output" if num_outputs else ""
        raise RequestError(
            f"prompt has {len(tokens)} tokens, but sequences may have {max_seq_len} here"
            f"{reserved}; shorten the prompt{length_hint}",
            "prompt",
        )


def is_far_longer(text: str, tokenizer: Tokenizer, num_tokens: int) -> bool:
    """Whether `text` has far more than `num_tokens` tokens; not all of it is tokenized."""
    # By its beginning, or a longer one: all tokens of 32 MB take minutes and gigabytes.
    size = PROBED_CHARACTERS * num_tokens
    while size < len(text):
        count = len(tokenizer.encode(text[:size], add_special_tokens=False))
        # Where a text is cut, it may have some tokens more.
        if count > num_tokens + num_tokens // 8 + 64:
            return True
        size *= 4
    return False


def check_ids(tokens: Sequence[int], parameter: str, vocab: int) -> None:
    """Raise RequestError when an id in sampling parameter `parameter` is not below `vocab`."""
    for token in tokens:
        if token >= vocab:
            raise RequestError(
                f"{parameter}: expected token ids from 0 to {vocab - 1}, got {token}", parameter
            )
