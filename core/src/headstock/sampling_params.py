"""How one request is sampled. Names and meanings are vLLM's, so that scripts port by changing an import."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final

from attrs import Attribute, evolve, field, fields, frozen

from headstock.errors import RequestError, shown

MAX_N: Final = 128
MAX_TEMPERATURE: Final = 2.0
MAX_PENALTY: Final = 2.0
MIN_REPETITION: Final = 0.01
MAX_REPETITION: Final = 100.0
MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 128  # characters
MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024  # entries
MAX_BIAS: Final = 100.0
MAX_ALLOWED_TOKEN_IDS: Final = 1 << 18
MAX_TOKEN_ID: Final = (1 << 31) - 1
MAX_COUNT: Final = (1 << 31) - 1  # tokens
MIN_SEED: Final = -(1 << 63)
MAX_SEED: Final = (1 << 63) - 1
DEFAULT_MAX_TOKENS: Final = 100
LARGEST: Final = sys.float_info.max

Check = Callable[[Any, "Attribute[Any]", Any], None]


def refuse(name: str, wanted: str, value: object) -> RequestError:
    """The one-line error of parameter `name`."""
    return RequestError(f"{name} must be {wanted}, got {shown(value)}", parameter=name)


def is_int(value: Any, low: int, high: int) -> bool:
    """Whether `value` is an integer (not a bool) in low..high."""
    return not isinstance(value, bool) and issubclass(type(value), Integral) and bool(low <= value <= high)


def is_real(value: Any) -> bool:
    """Whether `value` is a finite number (not a bool)."""
    return not isinstance(value, bool) and issubclass(type(value), Real) and bool(-LARGEST <= value <= LARGEST)


def check_priority(value: Any) -> int:
    """A request's priority, when it is one.   raises: RequestError"""
    if not is_int(value, -MAX_COUNT, MAX_COUNT):
        raise refuse("priority", "an integer of at most 31 bits", value)
    return int(value)


def whole(low: int, high: int, wanted: str, *, optional: bool = False) -> Check:
    """A check for integers in low..high; None passes when `optional`."""

    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        if not (optional and value is None) and not is_int(value, low, high):
            raise refuse(attribute.name, wanted, value)

    return check


def number(low: float, high: float, wanted: str, *, above: bool = False) -> Check:
    """A check for finite numbers in low..high; `above` excludes `low`."""

    def check(_: object, attribute: Attribute[Any], value: Any) -> None:
        if not is_real(value) or not low <= value <= high or (above and value == low):
            raise refuse(attribute.name, wanted, value)

    return check


def truth(_: object, attribute: Attribute[Any], value: object) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise refuse(attribute.name, "true or false", value)


def stops(_: object, attribute: Attribute[Any], value: object) -> None:
    """Raises unless `value` holds at most MAX_STOP_STRINGS non-empty strings of at most MAX_STOP_LENGTH characters."""
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise refuse(attribute.name, "a string or a list of strings", value)
    if len(value) > MAX_STOP_STRINGS:
        raise refuse(attribute.name, f"at most {MAX_STOP_STRINGS} strings", f"{len(value)}")
    for text in value:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise refuse(attribute.name, f"strings of 1 to {MAX_STOP_LENGTH} characters", f"one of {len(text)}")


def token_ids(most: int, *, empty: bool) -> Check:
    """A check for tuples of at most `most` token ids; None passes where an empty tuple does not."""

    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and not empty:
            return
        if not isinstance(value, tuple):
            raise refuse(attribute.name, "a list of token ids", value)
        if len(value) > most or not (value or empty):
            raise refuse(attribute.name, f"{0 if empty else 1} to {most} token ids", f"{len(value)}")
        for token in value:
            if not is_int(token, 0, MAX_TOKEN_ID):
                raise refuse(attribute.name, f"token ids of 0 to {MAX_TOKEN_ID}", token)

    return check


def biases(_: object, attribute: Attribute[Any], value: object) -> None:
    """Raises unless `value` is None or maps at most MAX_LOGIT_BIAS token ids to numbers within MAX_BIAS of zero."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise refuse(attribute.name, "a mapping of token ids to numbers", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise refuse(attribute.name, f"at most {MAX_LOGIT_BIAS} entries", f"{len(value)}")
    for token, bias in value.items():
        if not is_int(token, 0, MAX_TOKEN_ID):
            raise refuse(attribute.name, f"keyed by token ids of 0 to {MAX_TOKEN_ID}", token)
        if not is_real(bias) or abs(bias) > MAX_BIAS:
            raise refuse(attribute.name, f"numbers between {-MAX_BIAS:g} and {MAX_BIAS:g}", bias)


def to_texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """One string, several or None as a tuple; anything else is left for the check to refuse."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]


def to_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    """A list, set or None as a tuple; anything else is left for the check to refuse."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else value  # type: ignore[return-value]


def to_some_ids(value: Iterable[int] | None) -> tuple[int, ...] | None:
    """As `to_ids`, but None stays None: no restriction, which an empty list would not mean."""
    return None if value is None else to_ids(value)


def to_id(key: Any) -> Any:
    """An integer where `key` spells one; anything else is left for the check to refuse."""
    return int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key


def to_bias(value: Mapping[int, float] | None) -> dict[int, float] | None:
    """A copy whose keys are integers where JSON made strings of them; anything else is left for the check to refuse."""
    if not isinstance(value, Mapping):
        return value
    return {to_id(key): bias for key, bias in value.items()}


PENALTY = number(-MAX_PENALTY, MAX_PENALTY, f"between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")
LOGPROBS = whole(0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or none", optional=True)


@frozen(kw_only=True)
class SamplingParams:
    """How one request is sampled; a value out of range raises RequestError on construction.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. `max_tokens` None means until the longest
    sequence the engine holds; a larger number is cut to that, and the answer then ends with "length". Of `n` answers,
    answer i is seeded with seed + i; seed None draws one from the engine's own. Stop strings are searched in the text,
    once `min_tokens` are out; `logprobs` and `prompt_logprobs` count the alternatives reported beside the token itself.
    raises: RequestError
    """

    n: int = field(default=1, validator=whole(1, MAX_N, f"an integer from 1 to {MAX_N}"))
    temperature: float = field(default=1.0, validator=number(0, MAX_TEMPERATURE, f"between 0 and {MAX_TEMPERATURE:g}"))
    top_p: float = field(default=1.0, validator=number(0, 1, "above 0 and at most 1", above=True))
    top_k: int = field(default=0, validator=whole(-1, MAX_COUNT, "a positive integer, or 0 or -1 for off"))
    min_p: float = field(default=0.0, validator=number(0, 1, "between 0 and 1"))
    presence_penalty: float = field(default=0.0, validator=PENALTY)
    frequency_penalty: float = field(default=0.0, validator=PENALTY)
    repetition_penalty: float = field(
        default=1.0, validator=number(MIN_REPETITION, MAX_REPETITION, "between 0.01 and 100.0")
    )
    seed: int | None = field(default=None, validator=whole(MIN_SEED, MAX_SEED, "a 64-bit integer", optional=True))
    stop: tuple[str, ...] = field(default=(), converter=to_texts, validator=stops)
    stop_token_ids: tuple[int, ...] = field(
        default=(), converter=to_ids, validator=token_ids(MAX_STOP_TOKEN_IDS, empty=True)
    )
    ignore_eos: bool = field(default=False, validator=truth)
    max_tokens: int | None = field(
        default=DEFAULT_MAX_TOKENS, validator=whole(1, MAX_COUNT, "a positive integer, or none", optional=True)
    )
    min_tokens: int = field(default=0, validator=whole(0, MAX_COUNT, "an integer of at least 0"))
    logprobs: int | None = field(default=None, validator=LOGPROBS)
    prompt_logprobs: int | None = field(default=None, validator=LOGPROBS)
    skip_special_tokens: bool = field(default=True, validator=truth)
    include_stop_str_in_output: bool = field(default=False, validator=truth)
    logit_bias: dict[int, float] | None = field(default=None, converter=to_bias, validator=biases, hash=False)
    allowed_token_ids: tuple[int, ...] | None = field(
        default=None, converter=to_some_ids, validator=token_ids(MAX_ALLOWED_TOKEN_IDS, empty=False)
    )

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)

    def answer(self, index: int, seed: int) -> SamplingParams:
        """These parameters for the answer at `index` alone, seeded with `seed` + index (modulo 2**64, as int64)."""
        whole_seed = (seed + index - MIN_SEED) % (1 << 64) + MIN_SEED
        return evolve(self, n=1, seed=whole_seed, prompt_logprobs=self.prompt_logprobs if index == 0 else None)

    def replace(self, values: Mapping[str, Any]) -> SamplingParams:
        """These parameters with `values` in place of some; a name that is none of them raises with a suggestion.

        raises: RequestError
        """
        names = [attribute.name for attribute in fields(SamplingParams)]
        for name in values:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(names)}"
                raise RequestError(f"no sampling parameter is called {shown(name)!r}{hint}", parameter=shown(name))
        return evolve(self, **values)
