"""Limits of SamplingParams' fields, the checks that enforce them, and converters."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final, TypeGuard

from attrs import Attribute, frozen

from headstock.errors import RequestError, format_count, shorten

MAX_N: Final = 128
MAX_TEMPERATURE: Final = 2.0
MAX_PENALTY: Final = 2.0
MIN_REPETITION: Final = 0.01
MAX_REPETITION: Final = 100.0
MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 256  # characters
MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024  # entries
MAX_BIAS: Final = 100.0
MAX_ALLOWED_TOKEN_IDS: Final = 1 << 18
MAX_TOKEN_ID: Final = (1 << 31) - 1
MAX_USER: Final = 512  # characters
MAX_EXTRA_ARGS: Final = 64
MAX_ARGUMENT_DEPTH: Final = 32
MAX_ARGUMENT_VALUES: Final = 10_000
MAX_COUNT: Final = (1 << 31) - 1  # tokens
MIN_SEED: Final = -(1 << 63)
MAX_SEED: Final = (1 << 63) - 1
DEFAULT_MAX_TOKENS: Final = 100
MAX_FLOAT: Final = sys.float_info.max


def make_parameter_error(name: str, rule: str, value: object) -> RequestError:
    """The error for a value of parameter `name` that is not what `rule` says."""
    return RequestError(f"{name}: expected {rule}, got {shorten(value)}", parameter=name)


def is_int(value: Any, low: int, high: int) -> TypeGuard[int]:
    """Whether `value` is an integer (not a bool) in low..high."""
    # numpy's integers are Integral; the type is asked, since a proxy may claim any __class__
    return (
        not isinstance(value, bool)
        and issubclass(type(value), Integral)
        and bool(low <= value <= high)
    )


def is_real(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number (not a bool)."""
    # NaN fails every comparison, and infinity the one with the largest float
    return (
        not isinstance(value, bool)
        and issubclass(type(value), Real)
        and bool(-MAX_FLOAT <= value <= MAX_FLOAT)
    )


def check_priority(value: object) -> int:
    """`value`, if it is a valid priority.   raises: RequestError"""
    if not is_int(value, -MAX_COUNT, MAX_COUNT):
        raise make_parameter_error("priority", "an integer of at most 31 bits", value)
    return int(value)


def check_some_allowed(
    min_tokens: int, allowed_ids: Iterable[int] | None, stop_ids: Iterable[int]
) -> None:
    """Raise RequestError when no token at all could be sampled before `min_tokens` are out."""
    if min_tokens and allowed_ids is not None and set(allowed_ids) <= set(stop_ids):
        raise RequestError(
            f"min_tokens ({min_tokens}) forbids tokens that end the answer until then, and "
            f"allowed_token_ids ({shorten(list(allowed_ids))}) has no others; allow one more token "
            "or leave min_tokens out",
            "allowed_token_ids",
        )


def check_room(min_tokens: int, room: int, length_hint: str) -> None:
    """Raise RequestError when an answer ends for want of room before `min_tokens` are out.

    room: the tokens that fit beside the prompt
    length_hint: what would allow longer sequences, as the end of an error
    """
    if min_tokens > room:
        raise RequestError(
            f"min_tokens ({min_tokens}) is more than the {format_count(room, 'token')} that fit "
            f"beside the prompt; lower it, or shorten the prompt{length_hint}",
            parameter="min_tokens",
        )


@frozen
class IntegerCheck:
    """A check for integers in low..high; None passes when `optional`."""

    low: int
    high: int
    rule: str
    optional: bool = False

    def __call__(self, _: object, attribute: Attribute[Any], value: object) -> None:
        if not (self.optional and value is None) and not is_int(value, self.low, self.high):
            raise make_parameter_error(attribute.name, self.rule, value)


@frozen
class NumberCheck:
    """A check for finite numbers in low..high; `above` excludes `low`."""

    low: float
    high: float
    rule: str
    above: bool = False

    def __call__(self, _: object, attribute: Attribute[Any], value: object) -> None:
        outside = not is_real(value) or not self.low <= value <= self.high
        if outside or (self.above and value == self.low):
            raise make_parameter_error(attribute.name, self.rule, value)


@frozen
class TextCheck:
    """A check for texts of at most `most` characters; None passes."""

    most: int

    def __call__(self, _: object, attribute: Attribute[Any], value: object) -> None:
        if value is None:
            return
        # Half a surrogate pair cannot be written as UTF-8, so no recording could hold it.
        if (
            not isinstance(value, str)
            or len(value) > self.most
            or any("\ud800" <= each <= "\udfff" for each in value)
        ):
            rule = f"a text of at most {self.most} characters"
            is_long = isinstance(value, str) and len(value) > self.most
            got = f"{len(str(value))}" if is_long else value
            raise make_parameter_error(attribute.name, rule, got)


def check_extra_args(_: object, attribute: Attribute[Any], value: object) -> None:
    """Raise RequestError unless `value` is None or names values that JSON can hold."""
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise make_parameter_error(attribute.name, "a mapping of names to values", value)
    if len(value) > MAX_EXTRA_ARGS:
        raise make_parameter_error(
            attribute.name, f"at most {MAX_EXTRA_ARGS} entries", f"{len(value)}"
        )
    if _has_more_values(value, MAX_ARGUMENT_VALUES):
        raise make_parameter_error(
            attribute.name, f"at most {MAX_ARGUMENT_VALUES} values, nested ones included", "more"
        )
    for key, entry in value.items():
        if not _is_json(entry, MAX_ARGUMENT_DEPTH):
            raise RequestError(
                f"{attribute.name}[{shorten(key)!r}]: expected a value of JSON (null, true, false, "
                "a number of 64 bits, a text, a list or an object, at most "
                f"{MAX_ARGUMENT_DEPTH} deep), got {shorten(entry)}",
                parameter=attribute.name,
            )


def _has_more_values(value: object, most: int) -> bool:
    """Whether lists and mappings in `value` hold more than `most` values together."""
    # Not by recursion, which they may be too deep for, nor to the end.
    waiting, count = [value], 0
    while waiting and count <= most:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            count += len(inner)
            if count <= most:
                waiting += inner.values() if isinstance(inner, dict) else inner
    return count > most


def _is_json(value: object, depth: int) -> bool:
    """Whether JSON can hold the value, and an engine in another process be sent it."""
    if value is None or isinstance(value, bool | str):
        return True
    if isinstance(value, int):
        return MIN_SEED <= value <= MAX_SEED
    if isinstance(value, float):
        return -MAX_FLOAT <= value <= MAX_FLOAT
    if depth and isinstance(value, list):
        return all(_is_json(each, depth - 1) for each in value)
    if depth and isinstance(value, dict):
        return all(
            isinstance(key, str) and _is_json(each, depth - 1) for key, each in value.items()
        )
    return False


def check_bool(_: object, attribute: Attribute[Any], value: object) -> None:
    """Raise RequestError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise make_parameter_error(attribute.name, "true or false", value)


def check_stop_strings(_: object, attribute: Attribute[Any], value: object) -> None:
    """Raise RequestError unless `value` is a tuple of strings within their limits."""
    if isinstance(value, tuple) and len(value) > MAX_STOP_STRINGS:
        raise make_parameter_error(
            attribute.name, f"at most {MAX_STOP_STRINGS} strings", f"{len(value)}"
        )
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise make_parameter_error(attribute.name, "a string or a list of strings", value)
    for text in value:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            got = f"one of {len(text)}" if text else "an empty string"
            raise make_parameter_error(
                attribute.name, f"strings of 1 to {MAX_STOP_LENGTH} characters", got
            )


@frozen
class TokenIdsCheck:
    """A check for tuples of at most `most` token ids; None passes where an empty tuple does not."""

    most: int
    empty: bool

    def __call__(self, _: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and not self.empty:
            return
        if not isinstance(value, tuple):
            raise make_parameter_error(attribute.name, "a list of token ids", value)
        if len(value) > self.most or not (value or self.empty):
            raise make_parameter_error(
                attribute.name,
                f"{0 if self.empty else 1} to {self.most} token ids",
                f"{len(value)}",
            )
        if _are_plain_ints(value) and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
            return
        for token in value:
            if not is_int(token, 0, MAX_TOKEN_ID):
                raise make_parameter_error(
                    attribute.name, f"token ids of 0 to {MAX_TOKEN_ID}", token
                )


def check_logit_bias(_: object, attribute: Attribute[Any], value: object) -> None:
    """Raise RequestError unless `value` is None or maps token ids to biases within the limits."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise make_parameter_error(attribute.name, "a mapping of token ids to numbers", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise make_parameter_error(
            attribute.name, f"at most {MAX_LOGIT_BIAS} entries", f"{len(value)}"
        )
    for token, bias in value.items():
        if not is_int(token, 0, MAX_TOKEN_ID):
            raise make_parameter_error(
                attribute.name, f"token ids of 0 to {MAX_TOKEN_ID} as keys", token
            )
        if not is_real(bias) or abs(bias) > MAX_BIAS:
            raise make_parameter_error(
                attribute.name, f"numbers between {-MAX_BIAS:g} and {MAX_BIAS:g}", bias
            )


def to_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """One string, several or None as a tuple; other values pass, for the check to refuse."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]


def to_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    """A list, set or None as a tuple; other values pass, for the check to refuse."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else value  # type: ignore[return-value]


def to_optional_ids(value: Iterable[int] | None) -> tuple[int, ...] | None:
    """As `to_ids`, each id once, but None stays None: no restriction, which an empty list would not
    mean.
    """
    ids = None if value is None else to_ids(value)
    # Each of them costs every step of the request.
    return tuple(dict.fromkeys(ids)) if isinstance(ids, tuple) and _are_plain_ints(ids) else ids


def _are_plain_ints(values: tuple[Any, ...]) -> bool:
    """Whether there are values, all of type int."""
    return set(map(type, values)) == {int}


def to_arguments(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A copy as a dict; None and other values pass, for the check to refuse."""
    return dict(value) if isinstance(value, Mapping) else value


def _to_int_key(key: Any) -> Any:
    """An integer where `key` spells one; other keys pass, for the check to refuse."""
    return int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key


def to_bias(value: Mapping[int, float] | None) -> dict[int, float] | None:
    """A copy whose keys are integers where JSON made strings of them; other values, and mappings
    that are too large, pass through.
    """
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        return value  # type: ignore[return-value]
    return {_to_int_key(key): bias for key, bias in value.items()}
