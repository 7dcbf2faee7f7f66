"""A stream without a server: what goes out when the client is behind, silent or gone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

import headstock_demo
from headstock import SamplingParams
from headstock.outputs import Update
from headstock.requests import PromptRequest
from headstock.text import Prompt, Tokenizer
from headstock_openai_server.api.errors import unavailable
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.engine.generation import Generation
from headstock_openai_server.http.event_stream import CHUNKS, SERVER_SENT, EventStream, Framing
from headstock_openai_server.routes import messages, ollama
from headstock_openai_server.routes.answering import UsageReport, make_identity
from headstock_openai_server.routes.chat import ChatStream

TEXT = "Once upon a time, there was a little girl"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(headstock_demo.__file__).parent / "checkpoint")


@define
class Bench:
    """A stream of one request, its client, and what the engine was asked to end."""

    tokenizer: Tokenizer
    has_chunks: bool
    n: int = 1
    stop: tuple[str, ...] = ()
    dropped: list[str] = field(factory=list)
    sent: list[bytes] = field(factory=list)
    ends: list[str] = field(factory=list)
    num_written: int = 0
    gone: asyncio.Event = field(factory=asyncio.Event)
    reading: asyncio.Event = field(factory=asyncio.Event)
    generation: Generation = field(init=False)

    def __attrs_post_init__(self) -> None:
        metrics = SimpleNamespace(
            count_start=lambda seconds, queued: None,
            count_answer=lambda prompt, output, seconds: None,
            count_prompt=lambda tokens: None,
            observe_token_gap=lambda seconds: None,
            count_end=lambda outcome, seconds: self.ends.append(outcome),
        )
        service: Any = SimpleNamespace(
            metrics=metrics,
            loop=SimpleNamespace(drop=self.dropped.extend),
            generations=set(),
            num_sequences=self.n,
            waiting_tokens=self.n,
            is_alive=True,
        )
        request = PromptRequest(
            "0",
            Prompt(None, (5,)),
            SamplingParams(max_tokens=99, n=self.n, stop=self.stop),
            tokenizer=self.tokenizer,
            stop_ids=(),
            max_output_tokens=99,
            seed=0,
        )
        self.generation = Generation(service, [request], streams=True)
        self.reading.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    def start(self, framing: Framing = SERVER_SENT) -> asyncio.Task[None]:
        generation, params = self.generation, self.generation.prompt_requests[0].params
        body = ChatBody(messages=[])
        usage = UsageReport(generation, body)
        chunks = ChatStream(make_identity("x-", "m"), body, params, usage)
        stream = EventStream(generation, chunks, framing)
        scope = {"type": "http", **({CHUNKS: self} if self.has_chunks else {})}
        return asyncio.create_task(stream(scope, self.receive, self.send))

    @property
    def is_ready(self) -> bool:
        return self.reading.is_set()

    def write(self, chunk: bytes) -> None:
        assert chunk
        self.sent.append(chunk)
        self.num_written += 1

    def tell(self, *tokens: int, request: str = "0", **end: Any) -> None:
        self.generation.on_update(Update(id=request, tokens=tokens, **end))

    def events(self) -> list[dict[str, Any]]:
        blocks = b"".join(self.sent).decode().split("\n\n")
        return [json.loads(each[6:]) for each in blocks if each.startswith("data: {")]

    def text(self) -> str:
        choices = [event["choices"][0] for event in self.events() if "choices" in event]
        return "".join(choice["delta"].get("content", "") for choice in choices)


async def turns(count: int = 5) -> None:
    """Let others run."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture(params=[False, True], ids=["by the task", "at once"])
def has_chunks(request: pytest.FixtureRequest) -> bool:
    """Whether the connection takes chunks at once."""
    return bool(request.param)


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXT)


def test_a_client_that_keeps_up_gets_a_chunk_for_each_token(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks)
        task = bench.start()
        for token in ids:
            await turns()
            bench.tell(token)
        await turns()
        bench.tell(finish_reason="length")
        await task
        return bench

    bench = asyncio.run(run())
    assert len(bench.events()) == 1 + len(ids) + 1
    assert bench.text() == TEXT
    assert bench.sent[-1].endswith(b"data: [DONE]\n\n") and bench.ends == ["length"]
    assert bench.dropped == [] and bench.num_written == (len(ids) if has_chunks else 0)


@pytest.mark.parametrize("framing", [SERVER_SENT, messages.FRAMING, ollama.FRAMING])
def test_a_silent_stream_is_kept_alive_in_the_way_of_its_api(
    tokenizer: Tokenizer, framing: Framing
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks=False)
        task = bench.start(framing)
        await turns()
        bench.generation.ping()
        await turns()
        bench.tell(5, finish_reason="stop")
        await task
        return bench

    sent = asyncio.run(run()).sent
    # Ollama's clients parse each line: nothing can be sent to them.
    assert sent[1:2] == [framing.ping] if framing.ping else b": ping" not in b"".join(sent)


def test_a_client_that_is_behind_gets_the_rest_in_one_chunk(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks)
        task = bench.start()
        await turns()
        bench.reading.clear()
        for token in ids:
            await turns()
            bench.tell(token)
        bench.reading.set()
        await turns()
        bench.tell(finish_reason="stop")
        await task
        return bench

    bench = asyncio.run(run())
    # the role, the token that was on its way, all others at once, and the reason
    assert len(bench.events()) == 4
    assert bench.text() == TEXT


def test_a_silent_stream_is_kept_alive_by_a_comment(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks)
        task = bench.start()
        await turns()
        bench.generation.ping()
        await turns()
        bench.tell(ids[0], finish_reason="length")
        await task
        return bench

    bench = asyncio.run(run())
    assert bench.sent[1] == b": ping\n\n"
    assert bench.text() == "Once"


def test_tokens_without_text_do_not_pass_for_something_sent(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks)
        task = bench.start()
        await turns()
        before = bench.generation.last_sent
        bench.tell(min(tokenizer.special_ids))
        await turns()
        assert bench.generation.last_sent == before
        bench.tell(ids[0])
        await turns()
        assert bench.generation.last_sent > before
        bench.tell(ids[1], finish_reason="length")
        await task
        return bench

    assert len(asyncio.run(run()).events()) == 4


def test_the_first_token_goes_out_at_once_and_says_what_was_cached(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks)
        task = bench.start()
        await turns()
        bench.tell(ids[0], cached_tokens=1, queue_seconds=0.5)
        assert bench.num_written == has_chunks
        await turns()
        bench.tell(ids[1], finish_reason="length")
        await task
        return bench

    bench = asyncio.run(run())
    (request,) = bench.generation.prompt_requests
    assert bench.generation.num_cached_tokens == 1
    assert request.metrics.queue_seconds == 0.5
    assert bench.generation.arrival < (request.metrics.first_token or 0.0)


def test_an_error_in_the_middle_is_an_event_before_the_end(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run(stop: bool) -> Bench:
        bench = Bench(tokenizer, has_chunks, n=2)
        task = bench.start()
        bench.tell(ids[0], request="0-1")
        await turns()
        if stop:
            bench.generation.stop(unavailable("the server is ending", "shutting_down"))
        else:
            bench.tell(request="0-0", finish_reason="error", error="secret")
        await task
        return bench

    for stop, code in ((True, "shutting_down"), (False, None)):
        bench = asyncio.run(run(stop))
        *_, last = bench.events()
        assert last["error"]["code"] == code and "secret" not in last["error"]["message"]
        assert bench.sent[-1].endswith(b"data: [DONE]\n\n")
        assert sorted(bench.dropped) == ["0-0", "0-1"], "what runs on would hold pages"
        assert bench.generation.service.num_sequences == 0


def test_a_client_that_goes_ends_its_requests(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks)
        task = bench.start()
        bench.tell(ids[0])
        await turns()
        bench.gone.set()
        await task
        return bench

    bench = asyncio.run(run())
    assert bench.dropped == ["0"] and bench.ends == ["abort"]
    assert b"[DONE]" not in b"".join(bench.sent)
    assert bench.generation.service.num_sequences == bench.generation.service.waiting_tokens == 0


def test_a_stop_string_ends_a_request_that_the_engine_would_go_on_with(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks, stop=("time,",))
        task = bench.start()
        for token in ids:  # all are on their way before the first is looked at
            bench.tell(token)
        await task
        return bench

    bench = asyncio.run(run())
    assert bench.text() == "Once upon a " and bench.dropped == ["0"] and bench.ends == ["stop"]
    assert bench.events()[-1]["choices"][0]["stop_reason"] == "time,"


def test_a_stop_string_ends_a_stream_whose_pieces_come_one_by_one(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool
) -> None:
    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks, stop=("time,",))
        task = bench.start()
        for token in ids:
            await turns()
            if not task.done():
                bench.tell(token)
        await task
        return bench

    bench = asyncio.run(run())
    assert bench.text() == "Once upon a " and bench.dropped == ["0"] and bench.ends == ["stop"]
    assert bench.sent[-1].endswith(b"data: [DONE]\n\n")
    assert b"ping" not in b"".join(bench.sent)


def test_a_piece_that_cannot_be_written_ends_the_stream_with_an_error(
    tokenizer: Tokenizer, ids: list[int], has_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stream: ChatStream, piece: object) -> bytes:
        raise RuntimeError("secret")

    async def run() -> Bench:
        bench = Bench(tokenizer, has_chunks)
        task = bench.start()
        await turns()
        monkeypatch.setattr(ChatStream, "write_piece", fail)
        bench.tell(ids[0])
        await task
        return bench

    bench = asyncio.run(run())
    assert bench.dropped == ["0"] and b"secret" not in b"".join(bench.sent)
    assert bench.events()[-1]["error"]["type"] == "server_error"
