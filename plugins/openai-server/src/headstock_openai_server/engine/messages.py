"""The typed msgpack messages between the HTTP process and the engine process.

One message is a frame: its length in 4 bytes, big-endian, and msgpack. Nothing is pickled.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from operator import attrgetter
from typing import Any, Generic, TypeVar

import attrs
import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from headstock import SamplingParams, StructuredOutputsParams
from headstock.errors import describe_error
from headstock.logs import log_event
from headstock.outputs import TokenLogprob, Update
from headstock.scheduler import PoolingKind, Request

LOG = logging.getLogger("headstock.serve")

AnyMessage = TypeVar("AnyMessage")

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 30
"""Maximum bytes of a frame; a longer length means that the stream is desynchronised."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A message in either direction."""


class WireRequest(msgspec.Struct, array_like=True, frozen=True):
    """A `Request`: its prompt as int32 bytes, and the parameters that differ from its batch's."""

    id: str
    prompt: bytes
    max_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    priority: int
    user: str
    adapter: str
    namespace: str
    wait_for_sample: bool
    prompt_logprobs: bool
    extra_args: dict[str, Any] | None
    pooling: PoolingKind
    params: dict[str, Any]


WireLogprob = tuple[int, float, tuple[tuple[int, float], ...], int | None]
"""The fields of a `TokenLogprob`."""


class WireUpdate(msgspec.Struct, array_like=True, frozen=True):
    """The fields of an `Update`."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[WireLogprob, ...] | None
    prompt_logprobs: tuple[WireLogprob | None, ...] | None
    finish_reason: str | None
    stop_token: int | None
    error: str | None
    cached_tokens: int | None
    preemptions: int
    queue_seconds: float | None
    embedding: tuple[float, ...] | None


class Start(Message, frozen=True):
    """The first message to an engine process: the fields of an EngineConfig, and its logs."""

    config: dict[str, Any]
    log_level: str
    least_level: str


class Submit(Message, frozen=True):
    """Requests that are accepted or refused together; the answer has the batch's number.

    params: the first request's parameters that differ from the defaults
    """

    batch: int
    params: dict[str, Any]
    requests: list[WireRequest]
    stream_tokens: bool


class Abort(Message, frozen=True):
    """End these requests; unknown ids are ignored."""

    ids: list[str]


class ResetPrefixCache(Message, frozen=True):
    """Empty the prefix index."""


class Inspect(Message, frozen=True):
    """Send a `Snapshot` after the next step; several requests before it get one."""


class Close(Message, frozen=True):
    """Stop after the current step, free the device and exit."""


class StartProgress(Message, frozen=True):
    """The progress of the start."""

    stage: str
    completed: int
    total: int


class Ready(Message, frozen=True):
    """The engine accepts requests; the fields are those of `StartedEngine`."""

    directory: str
    vocab: int
    max_seq_len: int
    length_hint: str
    eos_ids: tuple[int, ...]
    summary: dict[str, Any]


class Failed(Message, frozen=True):
    """The engine could not start or has died: a HeadstockError by its type's name."""

    kind: str
    text: str


class Accepted(Message, frozen=True):
    """The requests of a batch are queued."""

    batch: int


class Refused(Message, frozen=True):
    """The batch was refused; `retry` says whether it may fit later."""

    batch: int
    text: str
    parameter: str | None
    capacity: bool
    retry: bool


class Step(Message, frozen=True):
    """The updates of one step."""

    updates: list[WireUpdate]


class Stats(Message, frozen=True):
    """The fields of an `EngineStats`; also a sign of life of the engine's thread."""

    counts: dict[str, int]


class Lane(msgspec.Struct, array_like=True, frozen=True):
    """A request in a snapshot and its token counts: in the prompt, cached ones among these,
    computed ones, and all that are known.
    """

    id: str
    prompt: int
    cached: int
    computed: int
    known: int


class TreeNode(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive pages shared by the same requests; the parent's index, -1 for none."""

    parent: int
    pages: int
    requests: int


class Snapshot(Message, frozen=True):
    """What an engine holds at one moment.

    running, waiting: the first of them; num_running, num_waiting: all
    page_maps: by KV group, a digit for each page: 0 free, 1 cached, 2 live, 3 shared
    tree: the prefixes that running requests share, parents before children
    """

    running: list[Lane]
    waiting: list[Lane]
    num_running: int
    num_waiting: int
    page_size: int
    page_maps: list[bytes]
    tree: list[TreeNode]


INVALID = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding an invalid message."""

ToEngine = Start | Submit | Abort | ResetPrefixCache | Inspect | Close
FromEngine = StartProgress | Ready | Failed | Accepted | Refused | Step | Stats | Snapshot


class FrameReader:
    """Splits a byte stream into the contents of its frames."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The contents of each frame that `data` completes.   raises: ValueError"""
        self.buffer += data
        start = 0
        while len(self.buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self.buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME} are valid")
            stop = start + HEADER.size + length
            if len(self.buffer) < stop:
                break
            yield bytes(memoryview(self.buffer)[start + HEADER.size : stop])
            start = stop
        del self.buffer[:start]


class MessageReader(Generic[AnyMessage]):
    """Reads the messages of type `kind` out of a stream of bytes; an invalid one is logged and
    dropped.
    """

    def __init__(self, kind: Any) -> None:
        self.frames = FrameReader()
        self.decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(kind)

    def feed(self, data: bytes) -> Iterator[AnyMessage]:
        """Each message that `data` completes.   raises: ValueError for a desynchronised stream"""
        for frame in self.frames.feed(data):
            try:
                message = self.decoder.decode(frame)
            except INVALID as error:
                LOG.error(log_event("a message was dropped", reason=describe_error(error)))
                continue
            yield message


def encode_frame(message: Message) -> bytes:
    """The frame of a message."""
    content = msgspec.msgpack.encode(message)
    return HEADER.pack(len(content)) + content


def pack_requests(batch: int, requests: Sequence[Request], *, stream_tokens: bool) -> Submit:
    """The message that submits one or more requests."""
    # Answers to one body only differ in their seeds. The rest may be 256 KB, 128 times.
    shared = requests[0].params
    return Submit(
        batch,
        _list_changes(SamplingParams(), shared),
        [_pack_request(request, _list_changes(shared, request.params)) for request in requests],
        stream_tokens,
    )


def _pack_request(request: Request, changes: dict[str, Any]) -> WireRequest:
    """The message form of a request whose parameters have these changes."""
    return replace(
        WireRequest(*_read_request(request)),
        prompt=np.ascontiguousarray(request.prompt, np.int32).tobytes(),
        extra_args=None if request.extra_args is None else dict(request.extra_args),
        params=changes,
    )


def _list_changes(before: SamplingParams, after: SamplingParams) -> dict[str, Any]:
    """The parameters that differ."""
    pairs = (
        (field.name, getattr(before, field.name), getattr(after, field.name))
        for field in attrs.fields(SamplingParams)
    )
    return {name: _as_plain(new) for name, old, new in pairs if new is not old and new != old}


def _as_plain(value: Any) -> Any:
    """The value of a parameter in a type that msgpack supports."""
    return value.as_dict() if isinstance(value, StructuredOutputsParams) else value


def unpack_requests(message: Submit) -> Iterator[Request]:
    """The requests of a message, with their parameters checked again.   raises: RequestError"""
    shared = SamplingParams(**message.params)
    for wire in message.requests:
        yield _unpack_request(wire, _change_params(shared, wire.params))


def _change_params(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """A copy with changes; only the changes are checked.   raises: RequestError"""
    changed = copy(params)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _unpack_request(wire: WireRequest, params: SamplingParams) -> Request:
    """The request of a message."""
    made = {"prompt": np.frombuffer(wire.prompt, np.int32), "params": params}
    return Request(**asdict(wire) | made)


def pack_update(update: Update) -> WireUpdate:
    """The message form of an update."""
    wire = WireUpdate(*_read_update(update))
    if update.logprobs is None and update.prompt_logprobs is None:  # as most are
        return wire
    return replace(
        wire,
        logprobs=_map_known(_read_logprob, update.logprobs),
        prompt_logprobs=_map_known(_read_logprob, update.prompt_logprobs),
    )


def unpack_update(wire: WireUpdate) -> Update:
    """The update of a message."""
    update = Update(*_read_update(wire))
    if wire.logprobs is None and wire.prompt_logprobs is None:
        return update
    return attrs.evolve(
        update,
        logprobs=_map_known(_make_logprob, wire.logprobs),
        prompt_logprobs=_map_known(_make_logprob, wire.prompt_logprobs),
    )


# The messages define which fields are sent; the records use the same names.
_read_request = attrgetter(*WireRequest.__struct_fields__)
_read_update = attrgetter(*WireUpdate.__struct_fields__)
_read_logprob = attrgetter(*(each.name for each in attrs.fields(TokenLogprob)))


def _make_logprob(wire: WireLogprob) -> TokenLogprob:
    """The log-probability of a message."""
    return TokenLogprob(*wire)


def _map_known(
    convert: Callable[[Any], Any], values: Sequence[Any] | None
) -> tuple[Any, ...] | None:
    """Convert each value that is known."""
    if values is None:
        return None
    return tuple(None if each is None else convert(each) for each in values)


def record_fields(record: Any) -> dict[str, Any]:
    """The fields of a flat record, by name."""
    return attrs.asdict(record, recurse=False)
