"""What the two processes say to each other arrives as it was said."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headstock import RequestError, SamplingParams
from headstock.outputs import TokenLogprob, Update
from headstock.scheduler import Request
from headstock_openai_server.engine import messages
from headstock_openai_server.engine.messages import (
    INVALID,
    Close,
    FrameReader,
    Step,
    Submit,
    ToEngine,
    WireRequest,
    WireUpdate,
    encode_frame,
    pack_requests,
    pack_update,
    unpack_requests,
    unpack_update,
)

PARAMS = SamplingParams(
    temperature=0.5,
    seed=-7,
    max_tokens=None,
    stop=("a", "é"),
    logit_bias={3: -100.0, 5: 2.5},
    allowed_token_ids=(1, 2, 3),
    logprobs=4,
    user="ada",
    extra_args={"a": [1, None]},
)


def send(message: Submit) -> Submit:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit)


def test_a_request_arrives_with_every_field() -> None:
    request = Request(
        id="12-3",
        prompt=np.array([5, 0, 767], np.int32),
        max_tokens=9,
        min_tokens=2,
        stop_ids=(0, 2),
        priority=-4,
        user="ada",
        adapter="lora",
        namespace="salt",
        wait_for_sample=True,
        prompt_logprobs=True,
        extra_args={"a": [1, None]},
        pooling="mean",
        params=PARAMS,
    )
    plain = Request(id="", prompt=np.zeros(1, np.int32), max_tokens=1)
    # Values of processors are made where the engine is.
    made = {"processor_values", "variant"}
    names = [each.name for each in fields(Request) if each.init and each.name not in made]
    assert names == list(WireRequest.__struct_fields__), "a new field needs its place in a message"
    (found,) = unpack_requests(send(pack_requests(1, [request], stream_tokens=True)))
    for name in names:
        sent = getattr(request, name)
        assert np.array_equal(getattr(found, name), sent), name
        assert name == "prompt" or sent != getattr(plain, name), f"{name} has its default"
    assert found.prompt.dtype == np.int32


def test_parameters_are_checked_again_where_they_arrive() -> None:
    request = Request(id="1", prompt=np.ones(1, np.int32), max_tokens=1, params=SamplingParams())
    good = pack_requests(1, [request], stream_tokens=True)
    bad = {"params": {"temperature": 3.0}}
    wires = [replace(wire, **bad) for wire in good.requests]
    for message in (replace(good, **bad), replace(good, requests=wires)):
        with pytest.raises(RequestError, match="temperature: expected a number between"):
            list(unpack_requests(message))


def test_what_the_requests_of_a_batch_share_is_sent_once() -> None:
    ids = tuple(range(10_000))
    asked = SamplingParams(n=3, allowed_token_ids=ids, prompt_logprobs=1, max_tokens=None)
    requests = [
        Request(
            id=f"{i}", prompt=np.ones(1, np.int32), max_tokens=1, params=asked.for_answer(i, 40)
        )
        for i in range(3)
    ]
    message = send(pack_requests(1, requests, stream_tokens=True))
    assert [wire.params for wire in message.requests] == [
        {},
        {"seed": 41, "prompt_logprobs": None},
        {"seed": 42, "prompt_logprobs": None},
    ]
    found = [each.params for each in unpack_requests(message)]
    assert found == [each.params for each in requests]
    assert found[0].allowed_token_ids is found[2].allowed_token_ids == ids


def test_an_update_arrives_with_every_field() -> None:
    update = Update(
        id="3",
        tokens=(4, 2),
        logprobs=(TokenLogprob(4, -0.5, ((4, -0.5), (9, -1.5))), TokenLogprob(2, -2.0, (), 7)),
        prompt_logprobs=(None, TokenLogprob(8, -0.25, ((8, -0.25),))),
        finish_reason="stop",
        stop_token=2,
        error="none",
        cached_tokens=16,
        preemptions=1,
        queue_seconds=0.5,
        embedding=(0.25, -1.0),
    )
    assert [each.name for each in fields(Update)] == list(WireUpdate.__struct_fields__)
    data = msgspec.msgpack.encode(pack_update(update))
    found = unpack_update(msgspec.msgpack.Decoder(WireUpdate).decode(data))
    assert found == update and found.queue_seconds == 0.5
    assert update != Update(id="3")


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6), cuts=st.lists(st.integers(0, 400), max_size=8)
)
def test_frames_are_the_same_however_the_stream_is_cut(sizes: list[int], cuts: list[int]) -> None:
    updates = [
        Step([pack_update(Update(id=str(i), tokens=tuple(range(n))))]) for i, n in enumerate(sizes)
    ]
    stream = b"".join(map(encode_frame, updates))
    reader, found, begin = FrameReader(), [], 0
    for end in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        found += reader.feed(stream[begin:end])
        begin = end
    assert [msgspec.msgpack.decode(each, type=Step) for each in found] == updates


def test_a_stream_out_of_step_is_noticed() -> None:
    with pytest.raises(ValueError, match="frame of 4294967295 bytes"):
        list(FrameReader().feed(b"\xff" * 8))


@given(st.binary(max_size=60))
def test_garbage_is_no_message_and_runs_nothing(data: bytes) -> None:
    try:
        message = msgspec.msgpack.decode(data, type=ToEngine)
    except INVALID:
        return
    assert isinstance(message, messages.Message | Close)
