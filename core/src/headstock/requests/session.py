"""An engine in use: its loop, its input processor, and the order in which they end."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from types import TracebackType

from headstock.callbacks import ProgressCallback
from headstock.config import EngineConfig
from headstock.errors import UsageError, shorten
from headstock.logs import log_event
from headstock.outputs import EmbeddingRequestOutput, RequestOutput
from headstock.requests.answer_formats import AnswerFormats
from headstock.requests.batch_params import (
    RequestParams,
    name_prompt_in_errors,
)
from headstock.requests.client import stream_outputs, stream_outputs_async
from headstock.requests.embedding_request import EmbeddingRequest
from headstock.requests.engine_protocol import EngineLoop, StartedEngine, StartEngine
from headstock.requests.inbox import Inboxes
from headstock.requests.input_processor import InputProcessor
from headstock.requests.process_life import check_can_start, check_process, hold_exit
from headstock.requests.prompt_request import PromptRequest
from headstock.requests.scorer import Scorer
from headstock.sampling_params import SamplingParams
from headstock.selection.tool_parsers import select_tool_parser
from headstock.spi import Ranks
from headstock.startup.part_hooks import NO_HOOKS, PartHooks
from headstock.startup.ranks import start_ranks
from headstock.text.chat import read_template
from headstock.text.prompt import PromptType
from headstock.text.tokenizer import NoTokenizer, Tokenizer

LOG = logging.getLogger(__name__)


def start_engine(
    config: EngineConfig,
    on_progress: ProgressCallback | None = None,
    after_step: Callable[[], None] | None = None,
    hooks: PartHooks = NO_HOOKS,
    ranks: Ranks | None = None,
) -> tuple[StartedEngine, EngineLoop]:
    """An engine for `config` in this process, and the loop that steps it on its own thread.

    `after_step` is called on that thread, as `headstock.engine.loop.Loop` says. `hooks` wraps the
    engine's parts, for tests. `ranks` are those of the engine, if they are started; they end where
    this raises.
    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """
    with hold_exit() as check_not_ending, ExitStack() as on_failure:
        # Other processes than this one import torch at the same time as this one does.
        ranks = ranks or start_ranks(config)
        on_failure.callback(ranks.close)
        from headstock.engine.engine import Engine
        from headstock.engine.loop import Loop

        check_can_start()

        def report(stage: str, completed: int, total: int) -> None:
            check_not_ending()
            if on_progress is not None:
                on_progress(stage, completed, total)

        engine = Engine(config, report, hooks, ranks)
        try:
            loop = Loop(engine, after_step)
        except BaseException:  # Ctrl-C
            engine.close()
            raise
        on_failure.pop_all()
        return engine, loop


class EngineSession:
    """Runs prompt requests on the engine that `start` gives.

    It must be closed, or used in a `with` statement. A process that this one forks cannot use it.
    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """

    def __init__(self, config: EngineConfig, start: StartEngine = start_engine) -> None:
        self.config = config
        self.closed = True  # until there is an engine to close
        self.process_id = os.getpid()
        # Before the engine starts, which may load weights for minutes.
        template = (
            None
            if config.chat_template is None
            else read_template(config.chat_template, "chat_template (--chat-template)")
        )
        if config.tool_parser not in ("auto", "off"):
            select_tool_parser(config.tool_parser)
        self.engine, self.loop = start(config)
        self.closed = False
        # The streams of an event loop hold its inbox, and without them neither is held.
        self.inboxes: Inboxes = weakref.WeakValueDictionary()
        # Refers to the loop alone: a finalizer that referred to the session would keep it alive.
        self.finalizer = weakref.finalize(
            self, _warn_and_abandon, self.loop, config.model, self.process_id
        )
        self.finalizer.atexit = False  # the loop ends itself then
        started = time.monotonic()
        try:
            self._input_processor = InputProcessor(
                self.engine,
                config.seed,
                template,
                AnswerFormats(config.tool_parser, config.reasoning_parser),
                open_objects=config.open_objects,
            )
        except BaseException:
            self.close()
            raise
        self.tokenizer_seconds = time.monotonic() - started
        # Errors that imports caught keep their frames in cycles, and so the frames that called them
        # just now: a session that is dropped would stay until Python happens to look for cycles.
        gc.collect(1)

    def list_summary(self, *, verbose: bool = True) -> list[str]:
        """The lines of the start-up print: what runs, and with `verbose` how and why."""
        later = ("tokenizer", self.tokenizer_seconds)
        summary = self.engine.summary
        return summary.lines(later) if verbose else summary.short_lines(later)

    @property
    def input_processor(self) -> InputProcessor:
        """What makes requests of prompts.   raises: UsageError after `close`, or after a fork"""
        self.check_open()
        return self._input_processor

    @cached_property
    def scorer(self) -> Scorer:
        """What makes requests for scores.   raises: UsageError after `close`, or after a fork"""
        return Scorer(self.input_processor, self.config.scoring)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._input_processor.tokenizer

    def prepare_chats(self) -> None:
        """Load what chats need beside texts, so that the first one does not wait for it.

        raises: ModelError
        """
        if not isinstance(self.tokenizer, NoTokenizer):
            _ = self.tokenizer.hf_tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of requests without any: generation_config.json over SamplingParams()."""
        return self._input_processor.default_params

    @property
    def default_chat_params(self) -> SamplingParams:
        """Those of conversations; without a number in generation_config.json, no `max_tokens`."""
        return self._input_processor.default_chat_params

    def check_requests(self, prompt_requests: Sequence[PromptRequest]) -> None:
        """Check what only the engine knows, such as grammars, before any of the requests runs.

        raises: RequestError, which names the prompt at fault
        """
        check = self.engine.check_sampling
        if check is None:
            return
        count = len(prompt_requests)
        for index, prompt_request in enumerate(prompt_requests):
            with name_prompt_in_errors(index, count):
                check(prompt_request.requests[0])  # the others differ in their seed alone

    def stream_outputs(
        self, prompt_requests: Sequence[PromptRequest], *, stream_tokens: bool = True
    ) -> Generator[tuple[PromptRequest, RequestOutput], None, None]:
        """Each piece of output with its prompt request, as it comes.

        Closing the generator aborts what has not ended. Without `stream_tokens`, a request's first
        token is a piece, and all others are one at its end.
        raises: UsageError at once after `close`, EngineDied
        """
        self.check_open()
        return stream_outputs(
            self.loop, prompt_requests, self.max_in_flight, stream_tokens=stream_tokens
        )

    def stream_embeddings(
        self, embedding_requests: Sequence[EmbeddingRequest]
    ) -> Generator[tuple[EmbeddingRequest, EmbeddingRequestOutput], None, None]:
        """Each embedding with its request, as it comes.

        Closing the generator aborts what has not ended.
        raises: UsageError at once after `close`, EngineDied
        """
        self.check_open()
        return stream_outputs(
            self.loop, embedding_requests, self.max_in_flight, stream_tokens=False
        )

    def stream_outputs_async(
        self, prompt_request: PromptRequest, *, stream_tokens: bool = True
    ) -> AsyncGenerator[tuple[PromptRequest, RequestOutput], None]:
        """As `stream_outputs`, of one prompt request, for asyncio."""
        self.check_open()
        return stream_outputs_async(
            self.loop,
            [prompt_request],
            self.max_in_flight,
            self.inboxes,
            stream_tokens=stream_tokens,
        )

    def stream(
        self, prompt: PromptType, params: RequestParams = None, priority: int = 0
    ) -> Iterator[RequestOutput]:
        """The output for one prompt in pieces, each with the new tokens alone.

        Closing the iterator ends the request.
        raises: RequestError and UsageError at once, EngineDied
        """
        return self.stream_request(self.input_processor.process(prompt, params, priority))

    def stream_request(self, prompt_request: PromptRequest) -> Iterator[RequestOutput]:
        """As `stream`, of a prompt request."""
        self.check_requests([prompt_request])
        outputs = self.stream_outputs([prompt_request])

        def pieces(_session: EngineSession) -> Iterator[RequestOutput]:
            # Holds the session, so that an LLM that nothing else refers to is not dropped while
            # its stream is read.
            with closing(outputs):
                for _, piece in outputs:
                    yield piece

        return pieces(self)

    @property
    def max_in_flight(self) -> int:
        """The most requests that are submitted and have not ended."""
        # Those that can run, and as many again to take their places without a step in between.
        return 2 * self.config.max_running_requests

    def check_open(self) -> None:
        """Raise UsageError after `close`, and in a process that this one forked."""
        check_process(self.process_id)
        if self.closed:
            raise UsageError("this LLM is closed; make a new one")

    def close(self) -> None:
        """End what runs and free the memory.

        A second call does nothing, unless the first was interrupted. In a forked process nothing
        runs, and the memory, files and connections are the other's.
        """
        if self.closed:
            return
        if os.getpid() != self.process_id:
            return
        self.closed = True  # right before the block that takes it back
        try:
            # The loop first: its thread must not step an engine whose device is gone.
            self.loop.close()
            self.engine.close()
        except BaseException:  # Ctrl-C, or Terminated
            self.closed = False
            raise
        self.finalizer.detach()

    def __enter__(self) -> EngineSession:
        self.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def _warn_and_abandon(loop: EngineLoop, model: str, process_id: int) -> None:
    """Warn of an LLM that was dropped without `close`, and stop its loop."""
    if os.getpid() != process_id:
        return
    try:
        LOG.warning(
            log_event(
                "an LLM was dropped without close()",
                model=shorten(model),
                use="close(), or with LLM(...)",
            )
        )
        warnings.warn(
            f"an LLM ({shorten(model)}) was dropped without close(); close it, or use `with "
            "LLM(...) as llm:`",
            ResourceWarning,
            stacklevel=2,
        )
    finally:
        # Not `close`: a garbage collector runs on any thread, the loop's own among them, and a
        # thread cannot wait for its own end.
        loop.abandon()
