"""What ranks say to each other, as typed msgpack messages; nothing is pickled.

One message is a frame: its length in 4 bytes, big-endian, and msgpack.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import attrs
import msgspec
import numpy as np

from headstock import SamplingParams, StructuredOutputsParams
from headstock.scheduler import Plan, Request, RequestState
from headstock.spi import Sample


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A message in either direction."""


class Start(Message, frozen=True):
    """The first message to a rank: which one it is.

    address: of rank 0's machine, as all ranks reach it
    one_gpu: all ranks have the first GPU
    """

    index: int
    count: int
    address: str
    one_gpu: bool
    log_level: str


class Shared(Message, frozen=True):
    """Rank 0's value of `Ranks.share`, or the least numbers of all ranks."""

    value: Any


class Collected(Message, frozen=True):
    """A rank's value of `Ranks.collect`, or its numbers of `Ranks.take_least`."""

    value: Any


class Array(msgspec.Struct, array_like=True, frozen=True):
    """An array of numpy."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A row that gets a request.

    tokens: int32, prompt and output so far
    num_prompt: how many of them are the prompt
    fields: those of the request that are as JSON has them
    params: what differs from the default parameters
    values: by logits processor, the request's values by column
    """

    row: int
    tokens: bytes
    num_prompt: int
    fields: dict[str, Any]
    params: dict[str, Any]
    values: list[dict[str, Array] | None]


class Execute(Message, frozen=True):
    """Run a plan, which `Plan.encode` made."""

    plan: bytes
    new_rows: list[NewRow]


class MaskedLogits(Message, frozen=True):
    """Which of the plan's logits are masked, int64; `Masks` follows if there are any."""

    logits: bytes


class Masks(Message, frozen=True):
    """The masks of a step for the rank's part of the vocabulary, int32."""

    words: bytes


class PrepareNext(Message, frozen=True):
    """Capture one graph."""


class Close(Message, frozen=True):
    """Free the device and end."""


class Finished(Message, frozen=True):
    """A rank has done a step or a capture.

    number: counts the messages that ask for one
    result: what must be equal on all ranks
    error: why it failed; empty if it did not
    """

    number: int
    result: int
    error: str


class Alive(Message, frozen=True):
    """A sign of life."""


class Failed(Message, frozen=True):
    """A rank cannot go on: a HeadstockError by its type's name."""

    kind: str
    text: str


ToRank = Start | Shared | Execute | MaskedLogits | Masks | PrepareNext | Close
FromRank = Collected | Finished | Alive | Failed

_OMITTED = frozenset({"prompt", "params", "processor_values", "extra_args"})
"""Fields of a request that travel in another form, or that no sampler reads."""
_FIELDS = tuple(
    each.name for each in attrs.fields(Request) if each.init and each.name not in _OMITTED
)
_DEFAULT = SamplingParams()


def make_execute(plan: Plan, new_rows: Mapping[int, RequestState]) -> Execute:
    """The message that has a rank run a plan."""
    return Execute(plan.encode(), [_pack_row(row, entry) for row, entry in new_rows.items()])


def _pack_row(row: int, entry: RequestState) -> NewRow:
    """The message form of a row that gets a request."""
    request = entry.request
    return NewRow(
        row,
        np.ascontiguousarray(entry.tokens, np.int32).tobytes(),
        len(request.prompt),
        {name: getattr(request, name) for name in _FIELDS},
        {
            each.name: _as_plain(value)
            for each in attrs.fields(SamplingParams)
            if (value := getattr(request.params, each.name)) != getattr(_DEFAULT, each.name)
        },
        [None if values is None else _pack_values(values) for values in request.processor_values],
    )


def _as_plain(value: Any) -> Any:
    """The value of a parameter as msgpack knows it."""
    return value.as_dict() if isinstance(value, StructuredOutputsParams) else value


def _pack_values(values: Mapping[str, Any]) -> dict[str, Array]:
    arrays = {name: np.asarray(value) for name, value in values.items()}
    return {
        name: Array(array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()
    }


def digest_sample(sample: Sample) -> int:
    """A digest of the tokens that a step has sampled, which all ranks must have sampled alike.

    sample: in host memory; the tokens of rows that failed do not count
    """
    tokens: Any = sample.tokens.numpy()
    healthy = sample.healthy.numpy()
    if b"\0" in healthy.tobytes():  # a third of what it takes to multiply
        tokens = np.multiply(tokens, healthy, dtype=np.int64)
    return zlib.crc32(tokens)


def read_execute(message: Execute) -> tuple[Plan, dict[int, RequestState]]:
    """The plan of a message, and the requests that it admits, by row.   raises: ValueError"""
    return Plan.decode(message.plan), {each.row: _unpack_row(each) for each in message.new_rows}


def _unpack_row(wire: NewRow) -> RequestState:
    """The request of a row, with what an executor reads of it."""
    tokens = np.frombuffer(wire.tokens, np.int32)
    values = tuple(None if each is None else _unpack_values(each) for each in wire.values)
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in wire.fields.items()
    }
    request = Request(
        prompt=tokens[: wire.num_prompt],
        params=SamplingParams(**wire.params),
        processor_values=values,
        **fields,
    )
    return RequestState(request=request, tokens=tokens, arrival=0)


def _unpack_values(wire: Mapping[str, Array]) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(each.data, each.dtype).reshape(each.shape)
        for name, each in wire.items()
    }
