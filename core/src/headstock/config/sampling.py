"""The settings of sampling, made from SamplingParams; unset ones are left to the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import frozen

from headstock.config.setting import Setting, make_negative_flag
from headstock.config.value_types import (
    Integer,
    InvalidValue,
    Number,
    Repeated,
    Switch,
    Text,
    Texts,
    Value,
    ValueType,
    make_invalid,
)
from headstock.errors import RequestError, shorten
from headstock.sampling_checks import (
    IntegerCheck,
    NumberCheck,
    TextCheck,
    TokenIdsCheck,
    check_bool,
    check_extra_args,
    check_logit_bias,
    check_stop_strings,
)
from headstock.sampling_params import SamplingParams
from headstock.structured_outputs import StructuredOutputsParams

SEPARATORS = re.compile(r"[\s,]+")
"""What separates the ids and biases of one text."""


def _check_value(name: str, value: object) -> Value:
    """The value as SamplingParams holds it in its field `name`.   raises: InvalidValue"""
    try:
        # The class itself checks, so that flags, files and Python have one rule and one sentence.
        return getattr(SamplingParams(**{name: value}), name)  # type: ignore[no-any-return,arg-type]
    except RequestError as error:
        raise InvalidValue(str(error).removeprefix(f"{name}: ")) from None


@frozen(kw_only=True)
class CheckedEntries(Repeated):
    """Several entries; SamplingParams limits their number and size. `name` is its field."""

    name: str

    def check_value(self, value: object) -> Value:
        """The value as SamplingParams holds it.   raises: InvalidValue"""
        return _check_value(self.name, value)


@frozen(kw_only=True)
class StopStrings(CheckedEntries):
    """Texts of one character or more; a flag that may be repeated, a list in a file."""

    form: str = "TEXT"

    def read(self, raw: object) -> Value:
        return self.check_value(
            Texts(item=Text(pattern=r"(?s).+", form=self.form), spaced=False).read(raw)
        )

    def show(self, value: Value) -> str:
        return " ".join(map(str, value)) if isinstance(value, tuple) else ""


@frozen(kw_only=True)
class TokenIdList(CheckedEntries):
    """Token ids: a list in a file, or text with commas or spaces between them.

    `auto` leaves them unset.
    """

    form: str = "ID[,ID]"

    def read(self, raw: object) -> Value:
        if raw is None or raw == "auto":
            return None
        return self.check_value(tuple(self.parse_number(entry) for entry in _split_entries(raw)))

    def parse_number(self, raw: object) -> object:
        """The id that a text spells; the check refuses any other value."""
        return int(raw) if isinstance(raw, str) and re.fullmatch(r"-?[0-9]{1,20}", raw) else raw

    def show(self, value: Value) -> str:
        return (
            "auto"
            if value is None
            else ",".join(map(str, value))
            if isinstance(value, tuple)
            else str(value)
        )


@frozen(kw_only=True)
class LogitBiases(CheckedEntries):
    """Biases of token ids: a table in a file, or text such as `42=-100,7=1.5`.

    `auto` leaves them unset.
    """

    form: str = "ID=BIAS"

    def read(self, raw: object) -> Value:
        if raw is None or raw == "auto":
            return None
        if isinstance(raw, Mapping):
            return self.check_value({key: self.parse_number(bias) for key, bias in raw.items()})
        return self.check_value(dict(self.parse_pair(entry) for entry in _split_entries(raw)))

    def parse_pair(self, raw: object) -> tuple[object, object]:
        """The id and the bias that a text spells.   raises: InvalidValue"""
        token, equals, bias = str(raw).partition("=")
        if not equals:
            raise make_invalid(self.form, raw)
        return token, self.parse_number(bias)

    def parse_number(self, raw: object) -> object:
        """The number that a text spells; the check refuses any other value."""
        try:
            return float(raw) if isinstance(raw, str) else raw
        except ValueError:
            return raw

    def show(self, value: Value) -> str:
        if not isinstance(value, Mapping):
            return "auto"
        return ",".join(f"{token}={bias:g}" for token, bias in value.items())


@frozen(kw_only=True)
class UserName(ValueType):
    """A text; `auto` leaves it unset. `name` is its field."""

    name: str

    def read(self, raw: object) -> Value:
        return None if raw is None or raw == "auto" else _check_value(self.name, raw)

    def describe(self) -> str:
        return "NAME, or 'auto'"

    def show(self, value: Value) -> str:
        return "auto" if value is None else str(value)


@frozen(kw_only=True)
class Arguments(ValueType):
    """Values by name: a table in a file, or a JSON object.

    `auto` leaves them unset. `name` is their field.
    """

    name: str

    def describe(self) -> str:
        return "JSON, or 'auto'"

    def read(self, raw: object) -> Value:
        if raw is None or raw == "auto":
            return None
        if isinstance(raw, str):
            try:
                raw = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise make_invalid("a JSON object", f"{shorten(raw)}: {error}") from None
        return _check_value(self.name, raw)

    def show(self, value: Value) -> str:
        return json.dumps(value) if isinstance(value, Mapping) else "auto"


@frozen(kw_only=True)
class StructuredOutputs(Arguments):
    """The structure of an answer: a table in a file, or JSON.

    `auto` leaves it unset. `name` is its field.
    """

    def read(self, raw: object) -> Value:
        value = super().read(raw)
        return value.as_dict() if isinstance(value, StructuredOutputsParams) else value


def _split_entries(raw: object) -> Iterable[object]:
    """The single entries of a text, or of a list of texts and numbers.   raises: InvalidValue"""
    if not isinstance(raw, str | list | tuple):
        raise make_invalid("a text or a list", raw)
    for entry in [raw] if isinstance(raw, str) else raw:
        yield from filter(None, SEPARATORS.split(entry)) if isinstance(entry, str) else [entry]


def collect_sampling_settings() -> dict[str, Setting]:
    """A setting for each field of SamplingParams, by its name."""
    return {field.name: _make_sampling_setting(field) for field in attrs.fields(SamplingParams)}


def _make_sampling_setting(field: attrs.Attribute[Any]) -> Setting:
    """The setting of a field; its default is None, which leaves the value to the model."""
    flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
    value_type = _choose_value_type(field)
    return Setting(
        name=field.name,
        flag=flag,
        value_type=value_type,
        help=field.metadata["help"],
        aliases=dict.fromkeys(field.metadata["aliases"], ""),
        default=None,
        default_text=field.metadata["default_text"] or value_type.show(field.default),
        negative=make_negative_flag(flag, value_type),
    )


def _choose_value_type(field: attrs.Attribute[Any]) -> ValueType:
    """How values of a field are read, with the limits of its check."""
    # From the validators of SamplingParams: limits written here again could differ from them.
    match field.validator:
        case IntegerCheck(low=low, high=high):
            return Integer(least=low, most=high, word="auto")
        case NumberCheck(low=low, high=high, rule=rule, above=above):
            return Number(least=low, most=high, rule=rule, above=above, word="auto")
        case TokenIdsCheck():
            return TokenIdList(name=field.name)
        case TextCheck():
            return UserName(name=field.name)
        case check if check is check_extra_args:
            return Arguments(name=field.name)
        case None if field.name == "structured_outputs":
            return StructuredOutputs(name=field.name)
        case check if check is check_bool:
            return Switch()
        case check if check is check_stop_strings:
            return StopStrings(name=field.name)
        case check if check is check_logit_bias:
            return LogitBiases(name=field.name)
    raise TypeError(f"no kind of setting reads {field.name}")
