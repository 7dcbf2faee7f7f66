"""The errors a user can meet. Each carries the exit code of the command line.

HeadstockError (70)
|-- UsageError (2)              a flag, value, file entry or name is wrong
|   |-- UnknownPlugin (2)       no plugin of that name
|   |-- AmbiguousPlugin (2)     several distributions provide the name
|   `-- NotSupported (2)        known from other engines, and not here yet; a RequestError too
|-- PluginBroken (3)            a plugin failed to load or is not what it says
|-- SpiMismatch (4)             a plugin was made for another version of the contract
|-- CannotRun (5)               nothing wrong, but not on this machine or in this combination
|-- ModelError (6)              a model directory or another input file cannot be read
|-- RequestError (1)            one request is invalid; the engine is fine
|   `-- CapacityError (1)       one request can never fit, or there is no room for it now
`-- EngineDied (70)             the engine cannot go on
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import ClassVar

__all__ = [
    "MAX_ERROR_LENGTH",
    "PLUGIN_FAILURES",
    "AmbiguousPlugin",
    "CannotRun",
    "CapacityError",
    "EngineDied",
    "HeadstockError",
    "ModelError",
    "NotSupported",
    "PluginBroken",
    "RequestError",
    "SpiMismatch",
    "UnknownPlugin",
    "UsageError",
    "compose_error",
    "describe_error",
    "describe_location",
    "describe_place",
    "describe_type",
    "find_nearest_name",
    "format_count",
    "join_names",
    "join_reasons",
    "name_setting",
    "shorten",
    "suggest_name",
]

MIN_SIMILARITY = 0.66
"""Names less similar are not suggested; two swapped letters in a word of three still pass."""


MAX_ERROR_LENGTH = 400
"""Characters of an error's line."""


PLUGIN_FAILURES = (Exception, SystemExit)
"""What plugins may raise: `sys.exit` too, but no KeyboardInterrupt, which is the user's."""


class HeadstockError(Exception):
    """An error that the user sees as one line: what was expected, what came, the next move."""

    exit_code: ClassVar[int] = 70


class UsageError(HeadstockError):
    """A flag, value, configuration entry or name is wrong."""

    exit_code = 2


class UnknownPlugin(UsageError):
    """No plugin of that name is installed."""


class AmbiguousPlugin(UsageError):
    """Several distributions provide the name."""


class PluginBroken(HeadstockError):
    """A plugin failed to load, or is not what its spec says."""

    exit_code = 3


class SpiMismatch(HeadstockError):
    """A plugin was made for another version of the contract."""

    exit_code = 4


class CannotRun(HeadstockError):
    """Nothing is wrong, but it cannot run on this machine or in this combination."""

    exit_code = 5


class ModelError(HeadstockError):
    """A model directory or another input file cannot be read."""

    exit_code = 6


class RequestError(HeadstockError):
    """One request is invalid; others are not affected. `parameter` names the field at fault."""

    exit_code = 1

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class CapacityError(RequestError):
    """One request can never fit the pool, or there is no room for it now."""


class NotSupported(UsageError, RequestError):
    """What other engines have, and headstock has not yet: a setting, a method, or a field of a
    request, then named by `parameter`.
    """


class EngineDied(HeadstockError):
    """The engine has stopped and cannot continue."""

    exit_code = 70


def shorten(value: object, most: int = 64) -> str:
    """`value` on one line of at most `most` characters, for error texts."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def name_setting(name: str, flag: str = "") -> str:
    """A setting as Python and the command line both know it: "page_size (--page-size)".

    `flag` is needed only where it is not the name with dashes.
    """
    return f"{name} ({flag or '--' + name.replace('_', '-')})"


def format_count(count: int, noun: str) -> str:
    """A count and its regular noun: "1 prompt", "2 prompts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def describe_error(error: BaseException) -> str:
    """An exception's type and 240 characters of its text: Python names what is missing last.

    An attrs validator adds arguments to its sentence, which are left out.
    """
    text = (
        error.args[0] if type(error) in (TypeError, ValueError) and len(error.args) > 1 else error
    )
    return f"{type(error).__name__}: {shorten(text, 240)}"


def join_names(names: Iterable[str], most: int, separator: str = ", ") -> str:
    """Names on one line of about `most` characters: those without room are counted.

    The first one is always there.
    """
    kept: list[str] = []
    left = list(names)
    while left and (not kept or len(separator.join([*kept, left[0]])) <= most):
        kept.append(left.pop(0))
    return separator.join(kept) + (f"{separator or '; '}{len(left)} more" if left else "")


def join_reasons(reasons: Iterable[str]) -> str:
    """Reasons joined by semicolons, without their full stops."""
    return "; ".join(reason.rstrip(".") for reason in reasons)


def compose_error(text: str, *more: str, most: int = MAX_ERROR_LENGTH) -> str:
    """`text; more; ...` on one line of at most `most` characters; the first part is cut if need be.

    What follows it is the next move, such as the name of a recording.
    """
    end = "".join(f"; {part}" for part in more if part)
    return shorten(text, most - len(end)) + end


def find_nearest_name(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` likely means: one that it begins, or a similar one of its length."""
    lower = {name.lower(): name for name in names}
    sought = word.lower()
    # "max" for "max_tokens": a beginning is a likelier slip than a similar name, but two letters
    # begin too many names.
    longer = [name for name in lower if len(sought) > 2 and name.startswith(sought)]
    if longer:
        return lower[min(longer, key=len)]
    # Names of another length share letters by chance.
    alike = [name for name in lower if abs(len(name) - len(sought)) <= max(1, len(sought) // 4)]
    close = difflib.get_close_matches(sought, alike, n=1, cutoff=MIN_SIMILARITY)
    return lower[close[0]] if close else None


def suggest_name(word: str, names: Iterable[str], prefix: str = "") -> str:
    """The end of an error text that asks for the most similar of `names`; empty when none is near.

    `prefix` begins all of them: it is shown, and not compared.
    """
    near = find_nearest_name(
        word.removeprefix(prefix), [name.removeprefix(prefix) for name in names]
    )
    return "" if near is None else f"; did you mean {prefix}{near}?"


def describe_location(error: BaseException) -> str:
    """FUNCTION (FILE:LINE) that raised an exception; empty for one that was never raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return (
        f"{frames[-1][0].f_code.co_qualname} ({frames[-1][0].f_code.co_filename}:{frames[-1][1]})"
        if frames
        else ""
    )


def describe_place(frame: FrameType, line: int) -> str:
    """`FUNCTION (FOLDER/FILE:LINE)`: whole paths are too long for one line."""
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_qualname} ({'/'.join(path.parts[-2:])}:{line})"


def describe_type(value: object) -> str:
    """The type of a value of a wrong type, and a plain value itself."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{name} {shorten(value)}" if isinstance(value, bool | int | float | str) else name
