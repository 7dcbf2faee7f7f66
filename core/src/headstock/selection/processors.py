"""Select the logits processors of an engine, and what a request gives them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import (
    CannotRun,
    PluginBroken,
    RequestError,
    UsageError,
    describe_error,
    shorten,
)
from headstock.selection.refusals import check_resolve
from headstock.spi import DeviceEnv, LogitColumn, LogitsProcessor, LogitsSpec, PartQuery
from headstock.spi.arrays import Ints


@frozen(kw_only=True)
class SelectedProcessor:
    """A logits processor, made with its options, and the columns that it declares."""

    spec: LogitsSpec
    processor: LogitsProcessor
    columns: Mapping[str, LogitColumn]

    def make_values(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """Make the values of a request's columns; None where all are neutral.

        args: an instance of the class of its `request_args`, or None
        raises: RequestError in the processor's words, or when it breaks a rule
        """
        name = f"the logits processor {self.spec.name!r}"
        try:
            values: Any = self.processor.row(args, prompt, vocab)
        except ValueError as error:
            raise RequestError(f"{name}: {shorten(error, 400)}", "extra_args") from error
        except (Exception, SystemExit) as error:
            # Of this request alone: others go on.
            raise RequestError(
                f"{name} raised {describe_error(error)}; {_BLAME}", "extra_args"
            ) from error
        if values is None:
            return None
        if not isinstance(values, Mapping) or not values.keys() <= self.columns.keys():
            raise RequestError(
                f"{name}: expected None, or values of {', '.join(self.columns)}, got "
                f"{shorten(values)}; {_BLAME}",
                "extra_args",
            )
        return {
            key: _check_value(name, key, value, self.columns[key]) for key, value in values.items()
        }

    @property
    def is_in_forward(self) -> bool:
        """Whether operations read some of its columns."""
        return any(column.in_forward for column in self.columns.values())


def digest_forward_values(
    processors: Sequence[SelectedProcessor], values: Sequence[Mapping[str, Any] | None]
) -> str:
    """Digest what operations read of a request's values; empty where all of it is neutral.

    Keys and values of equal tokens are the same for requests of equal digests alone.
    values: by processor, as `make_values` made them
    """
    digest, is_neutral = hashlib.blake2b(digest_size=16), True
    for each, given in zip(processors, values, strict=True):
        for name, column in each.columns.items():
            if not column.in_forward or given is None or name not in given:
                continue
            array = np.asarray(given[name], column.dtype)
            if array.tobytes() == np.full_like(array, column.neutral).tobytes():
                continue
            is_neutral = False
            # The lengths of names keep their ends apart.
            head = f"{len(each.spec.name)}:{each.spec.name}{len(name)}:{name}{array.nbytes}:"
            digest.update(head.encode() + array.tobytes())
    return "" if is_neutral else digest.hexdigest()


_BLAME = "report it to its author or leave it out of logits_processors (--logits-processors)"


def _check_value(name: str, key: str, value: object, column: LogitColumn) -> np.ndarray:
    """Return the value as its column holds it.   raises: RequestError when it does not fit"""
    shape = (column.width,) if column.width else ()
    try:
        raw = np.asarray(value)
        with np.errstate(invalid="ignore"):  # a number that is too large is found below
            array = raw.astype(column.dtype) if raw.dtype.kind in "biuf" else None
    except (TypeError, ValueError, OverflowError):
        array = None
    # A fraction is not cut, and a number that is too large does not turn round.
    is_whole = column.dtype != "int64" or (array is not None and bool((array == raw).all()))
    if array is None or array.shape != shape or not is_whole:
        raise RequestError(
            f"{name}: column {key!r}: expected {column.dtype} {list(shape) or 'number'}, got "
            f"{shorten(value)}; {_BLAME}",
            "extra_args",
        )
    return array


def select_processors(
    config: EngineConfig, query: PartQuery, env: DeviceEnv
) -> tuple[SelectedProcessor, ...]:
    """Select the processors that the configuration names, in its order.

    raises: UnknownPlugin, PluginBroken, SpiMismatch, CannotRun, UsageError
    """
    names = config.logits_processors
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            f"logits_processors (--logits-processors) names {shorten(twice)} twice; name it once"
        )
    return tuple(_select_processor(name, config, query, env) for name in names)


def _select_processor(
    name: str, config: EngineConfig, query: PartQuery, env: DeviceEnv
) -> SelectedProcessor:
    """Select one processor."""
    spec: LogitsSpec = registry.load_spec("logits", name)
    registry.require_installed(spec)
    check_resolve(spec, "logits_processors (--logits-processors)", query, env)
    options = () if spec.options is None else (registry.make_options(spec, config.opt),)
    try:
        processor: LogitsProcessor = registry.make_part(
            spec, LogitsProcessor, *options, expected=(ValueError,)
        )
    except ValueError as error:
        raise CannotRun(
            f"logits_processors (--logits-processors) {spec.name}: {shorten(error, 400)}"
        ) from error
    columns: object = processor.columns
    changes: object = processor.changes_argmax
    if (
        not isinstance(columns, Mapping)
        or not all(isinstance(each, LogitColumn) for each in columns.values())
        or not isinstance(changes, bool)
    ):
        raise PluginBroken(
            f"the logits processor {spec.name!r}: columns and changes_argmax: expected a mapping "
            f"of names to LogitColumn and a bool, got {shorten(columns)} and {shorten(changes)}; "
            "report it to its author"
        )
    return SelectedProcessor(spec=spec, processor=processor, columns=columns)
