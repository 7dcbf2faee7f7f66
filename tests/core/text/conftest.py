"""Small tokenizers, and a scripted engine whose next token is known, to test everything between
text and engine.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.errors import EngineDied, RequestError
from headstock.llm import LLM
from headstock.outputs import TokenLogprob, Update
from headstock.scheduler.request import Request
from headstock.text.tokenizer import Tokenizer

from .running import Run

TEMPLATE = (
    "{% for m in messages %}<|im|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant: {% endif %}"
)


def write_byte_level(directory: Path) -> None:
    """A byte-level BPE tokenizer with all 256 bytes, an end token (0), a special token (1) and a
    chat template.
    """
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|im|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(
        ["hello world, the quick brown fox", "Übermut tut selten gut", "日本語 😀"] * 3, trainer
    )
    inner.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_byte_fallback(directory: Path) -> None:
    """A tokenizer in the manner of Llama 2: ▁ for spaces, bytes as <0xNN>, the first space of a
    text dropped.
    """
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "▁▁",
        "é",
        "日",
    ]
    inner = Inner(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            [],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["</s>"])
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("byte_level")
    write_byte_level(directory)
    return directory


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-fallback tokenizer."""
    directory = tmp_path_factory.mktemp("byte_fallback")
    write_byte_fallback(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(byte_level: Path) -> Tokenizer:
    """The byte-level tokenizer."""
    return Tokenizer(byte_level)


def next_token(history: list[int], vocab: int) -> int:
    """A token that depends on every token before it; 2 and above, so never a special one."""
    digest = hashlib.blake2b(",".join(map(str, history)).encode(), digest_size=8).digest()
    return 2 + int.from_bytes(digest, "big") % (vocab - 2)


@define
class Row:
    """A live request of the scripted loop."""

    request: Request
    sink: Callable[[Update], None]
    out: list[int] = field(factory=list)


@define(eq=False)
class ScriptedLoop:
    """Steps every live request on its own thread, `pace` tokens at once, as `engine.loop.Loop`
    would.

    `script(request)` gives the tokens to say; without one the next token is a hash of all before.
    `hold` stops the stepping while set; once `idle_rounds` has grown, all is passed on. `preempted`
    is what is said of each request at its end.
    """

    vocab: int
    script: Callable[[Request], list[int]] | None = None
    pace: int = 1
    preempted: int = 0
    refuse: set[str] = field(factory=set)
    rows: dict[str, Row] = field(factory=dict)
    seen: list[Request] = field(factory=list)
    aborted: list[str] = field(factory=list)
    most: int = 0
    closed: int = 0
    abandoned: int = 0
    died: EngineDied | None = None
    has_ended: bool = False
    # Ctrl-C is tested, and would leave a Condition locked
    lock: Any = field(factory=threading.Lock)
    hold: threading.Event = field(factory=threading.Event)
    idle_rounds: int = 0
    thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.thread = threading.Thread(target=self.drive, daemon=True)
        self.thread.start()

    def submit(
        self, request: Request, sink: Callable[[Update], None], *, stream_tokens: bool = True
    ) -> None:
        with self.lock:
            self.check_alive()
            if request.id in self.refuse:
                raise RequestError("refused by the script")
            self.seen.append(request)
            self.rows[request.id] = Row(request, sink)
            self.most = max(self.most, len(self.rows))

    def abort(self, name: str) -> None:
        with self.lock:
            self.aborted.append(name)
            row = self.rows.pop(name, None)
        if row is not None:
            row.sink(Update(id=name, finish_reason="abort"))

    def check_alive(self) -> None:
        if self.died is not None:
            raise self.died

    def die(self) -> None:
        """End every request as a dead engine does."""
        with self.lock:
            self.died = EngineDied("the engine died: scripted")
            rows, self.rows = self.rows, {}
        for row in rows.values():
            row.sink(
                Update(id=row.request.id, finish_reason="error", error="the engine died: scripted")
            )

    def close(self) -> None:
        with self.lock:
            self.closed += 1
        self.thread.join()

    def abandon(self) -> None:
        self.abandoned += 1

    def drive(self) -> None:
        try:
            self.step_on()
        except BaseException:  # a script or a sink that raises
            self.die()
            raise

    def step_on(self) -> None:
        while True:
            with self.lock:
                if self.closed:
                    return
                rows = [] if self.hold.is_set() else list(self.rows.values())
                news = [self.advance(row) for row in rows]
            if not rows:
                self.idle_rounds += 1
                time.sleep(0.0005)
            self.emit(rows, news)

    def emit(self, rows: list[Row], updates: list[Update]) -> None:
        # A function of its own: the thread's frame would hold the last row's sink for ever.
        for row, update in zip(rows, updates, strict=True):
            row.sink(update)

    def advance(self, row: Row) -> Update:
        request, tokens, stop, reason = row.request, [], None, None
        script = self.script(request) if self.script else None
        while len(tokens) < self.pace and reason is None:
            history = [*map(int, request.prompt), *row.out]
            token = next_token(history, self.vocab) if script is None else script[len(row.out)]
            row.out.append(token)
            tokens.append(token)
            if token in request.stop_ids and len(row.out) > request.min_tokens:
                stop, reason = token, "stop"
            elif len(row.out) == request.max_tokens or (
                script is not None and len(row.out) == len(script)
            ):
                reason = "length"
        if reason is not None:
            del self.rows[request.id]
        first = len(row.out) == len(tokens)
        asked = request.params.logprobs
        scores = [
            TokenLogprob(token=token, logprob=-0.5, top=((token, -0.5), (5, -2.0))[:asked])
            for token in tokens
        ]
        prompt = [
            None,
            *(TokenLogprob(token=int(t), logprob=-1.0, top=()) for t in request.prompt[1:]),
        ]
        return Update(
            id=request.id,
            tokens=tuple(tokens),
            logprobs=None if asked is None else tuple(scores),
            prompt_logprobs=tuple(prompt) if first and request.prompt_logprobs else None,
            finish_reason=reason,
            stop_token=stop,
            cached_tokens=0 if first else None,
            preemptions=self.preempted if reason else 0,
        )


@pytest.fixture
def scripted(
    byte_level: Path, tokenizer: Tokenizer
) -> Iterator[Callable[..., tuple[LLM, ScriptedLoop]]]:
    """Makes LLMs over scripted engines; they are closed afterwards."""
    made: list[LLM] = []

    def make(
        directory: Path = byte_level,
        max_seq_len: int = 256,
        running: int = 4,
        chat_template: str | None = None,
        open_objects: bool = False,
        **options: object,
    ) -> tuple[LLM, ScriptedLoop]:
        loop = ScriptedLoop(tokenizer.vocab_size, **options)  # type: ignore[arg-type]
        engine = SimpleNamespace(
            directory=directory,
            model=SimpleNamespace(vocab=tokenizer.vocab_size),
            max_seq_len=max_seq_len,
            length_hint=" or raise --max-seq-len",
            eos_ids=(0,),
            request_args=None,
            check_sampling=None,
            close=lambda: None,
            summary=SimpleNamespace(
                short_lines=lambda *later: ["model: scripted"], no_text="", placeholders=()
            ),
            stats=lambda: SimpleNamespace(draft_line=""),
        )
        config = EngineConfig(
            max_running_requests=running, chat_template=chat_template, open_objects=open_objects
        )
        llm = LLM(config=config, start=lambda config: (engine, loop))
        made.append(llm)
        return llm, loop

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def run(scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `headstock run ARGUMENTS` with standard input from bytes; the exit code, output and
    errors.

    `absent`: loading a model fails the test.
    """

    def call(
        *arguments: str, stdin: bytes = b"", absent: bool = False, **options: Any
    ) -> tuple[int, str, str]:
        def load(config: Any, start: Any) -> Any:
            assert not absent, "no model was to be loaded"
            return scripted(chat_template=config.chat_template, **options)[0]._session

        monkeypatch.setattr("headstock.requests.session.EngineSession", load)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setenv("HEADSTOCK_TRACEBACK", "0")
        code = main(["run", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
