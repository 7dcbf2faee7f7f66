"""The engine as a Python object: prompts in, text out."""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from types import TracebackType
from typing import Any

from headstock.callbacks import ProgressCallback
from headstock.config import EngineConfig, make_engine_config
from headstock.errors import UsageError, describe_type, shorten
from headstock.logs import log_event
from headstock.outputs import RequestOutput
from headstock.requests.client import stream_outputs, stream_outputs_async
from headstock.requests.input_processor import InputProcessor, ParamsInput, name_prompt_in_errors
from headstock.requests.progress import UseTqdm, prompt_bar
from headstock.requests.prompt_request import PromptRequest
from headstock.sampling_params import SamplingParams
from headstock.text.chat import Message, read_template
from headstock.text.prompt import Prompt, PromptType, list_prompts
from headstock.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)


def start_engine(config: EngineConfig, on_progress: ProgressCallback | None) -> tuple[Any, Any]:
    """An engine for `config`, and the loop that steps it on a thread of its own."""
    from headstock.engine.engine import Engine
    from headstock.engine.loop import Loop

    engine = Engine(config, on_progress)
    try:
        return engine, Loop(engine)
    except BaseException:  # Ctrl-C
        engine.close()
        raise


class LLM:
    """A model ready to generate; close it, or use it in a `with` statement, to give its memory
    back.

    One that is dropped without that gives a log line and a ResourceWarning; its threads end and its
    memory is freed soon after.

    Keywords are the flags of the command line with underscores (`attn="sdpa"`, `page_size=16`);
    `config` is a file of settings that rank below them, as with `--config`, or an EngineConfig,
    which takes the place of them all. Several may live in one process, and one may be called from
    several threads.
    raises: UsageError, CannotRun, ModelError
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | str | Path | None = None,
        on_progress: ProgressCallback | None = None,
        start: Callable[[EngineConfig, ProgressCallback | None], tuple[Any, Any]] = start_engine,
        **settings: Any,
    ) -> None:
        self.closed = True
        self.config = make_config(model, config, settings)
        with self.config.spelling.render_errors():
            given = self.config.chat_template
            template = (
                None
                if given is None
                else read_template(given, self.config.spell("--chat-template"))
            )  # before a model is loaded for minutes
            self.engine, self.loop = start(self.config, on_progress)
        self.closed = False
        self.finalizer = weakref.finalize(self, warn_and_abandon, self.loop, self.config.model)
        self.finalizer.atexit = False  # the system frees all then, and other threads may be gone
        try:
            self.input_processor = InputProcessor(
                self.engine, self.config.seed, self.config.spelling, template
            )
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsInput = None,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers to the prompts, in their order. All are checked before any runs.

        Prompts of lower `priority` go first and, where seats or pages are short, take those of
        others (0 by default). An answer that fails while it runs has finish_reason "error", and the
        others go on. `use_tqdm` draws a bar on standard error: True with `tqdm.auto`, a callable
        with what it makes.
        raises: RequestError naming the prompt at fault, EngineDied
        """
        return self.run(
            self.input_processor.process_batch(list_prompts(prompts), sampling_params, priority),
            use_tqdm=use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsInput = None,
        use_tqdm: UseTqdm = False,
        *,
        chat_template: str | Path | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, of one conversation or several through the model's chat template.

        `chat_template`, a Jinja template or the name of a file with one, takes its place.
        raises: UsageError when there is no template, RequestError, ModelError, EngineDied
        """
        several = (
            isinstance(messages, list | tuple)
            and bool(messages)
            and isinstance(messages[0], list | tuple)
        )
        talks: Sequence[Any] = messages if several else [messages]
        template = None if chat_template is None else read_template(chat_template)
        prompts = []
        for index, talk in enumerate(talks):
            with name_prompt_in_errors(index, len(talks)):
                prompts.append(self.input_processor.render_chat(talk, template))
        return self.run(
            self.input_processor.process_batch(prompts, sampling_params), use_tqdm=use_tqdm
        )

    def stream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, priority: int = 0
    ) -> Iterator[RequestOutput]:
        """The answer in pieces: each output holds only what is new. Closing the iterator ends the
        request.

        raises: RequestError at once, EngineDied
        """
        events = self.events([self.input_processor.process(prompt, sampling_params, priority)])

        def pieces(_llm: LLM) -> Iterator[RequestOutput]:
            """The outputs alone; while they come, the LLM is not dropped."""
            with closing(events):
                for _, piece in events:
                    yield piece

        return pieces(self)

    async def generate_async(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, priority: int = 0
    ) -> RequestOutput:
        """The whole answer to one prompt; cancelling the task ends the request.

        raises: RequestError, EngineDied
        """
        prompt_request = await asyncio.to_thread(
            self.input_processor.process, prompt, sampling_params, priority
        )
        async with aclosing(self.events_async(prompt_request, stream_tokens=False)) as events:
            async for _ in events:
                pass
        return prompt_request.final_output()

    async def astream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """As `stream`, for asyncio; cancelling the task or closing the iterator ends the request.

        raises: RequestError, EngineDied
        """
        prompt_request = await asyncio.to_thread(
            self.input_processor.process, prompt, sampling_params, priority
        )
        async with aclosing(self.events_async(prompt_request)) as events:
            async for _, piece in events:
                yield piece

    def chat_prompt(
        self, messages: Sequence[Message], *, chat_template: str | Path | None = None
    ) -> Prompt:
        """The prompt that the chat template makes of `messages`, to give to `generate`, `stream`
        and the others.

        `chat_template` takes the place of the model's, as in `chat`.
        raises: UsageError when there is no template, RequestError, ModelError
        """
        return self.input_processor.render_chat(
            messages, None if chat_template is None else read_template(chat_template)
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the checkpoint's generation_config.json over
        SamplingParams().
        """
        return self.input_processor.default_params

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self.input_processor.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes of finished requests, so that what is submitted next finds none; for
        measurements.

        raises: UsageError after `close`, EngineDied
        """
        self.check_open()
        self.loop.reset_prefix_cache()

    def run(
        self, prompt_requests: Sequence[PromptRequest], *, use_tqdm: UseTqdm = False
    ) -> list[RequestOutput]:
        """The results of `prompt_requests`, in their order.   raises: UsageError, EngineDied"""
        with (
            prompt_bar(use_tqdm, len(prompt_requests)) as advance,
            closing(self.events(prompt_requests, stream_tokens=False)) as events,
        ):
            for prompt_request, piece in events:
                advance(prompt_request.is_finished, piece.num_output_tokens)
        return [prompt_request.final_output() for prompt_request in prompt_requests]

    def events(
        self, prompt_requests: Sequence[PromptRequest], *, stream_tokens: bool = True
    ) -> Generator[tuple[PromptRequest, RequestOutput], None, None]:
        """Each piece of output with its prompt request, as it comes; closing the iterator aborts
        them. Without `stream_tokens`, a request's first token is a piece, and all others are one at
        its end.

        raises: EngineDied
        """
        self.check_open()
        return stream_outputs(
            self.loop, prompt_requests, self.max_in_flight, stream_tokens=stream_tokens
        )

    def events_async(
        self, prompt_request: PromptRequest, *, stream_tokens: bool = True
    ) -> AsyncGenerator[tuple[PromptRequest, RequestOutput], None]:
        """As `events`, of one prompt_request, for asyncio."""
        self.check_open()
        return stream_outputs_async(
            self.loop, [prompt_request], self.max_in_flight, stream_tokens=stream_tokens
        )

    @property
    def max_in_flight(self) -> int:
        """Requests handed over at once: those that can run, and as many again to take their
        places.
        """
        return 2 * self.config.max_running_requests

    def check_open(self) -> None:
        """Raise UsageError after `close`."""
        if self.closed:
            raise UsageError("this LLM is closed; make a new one")

    def close(self) -> None:
        """End what runs and give the memory back; a second call does nothing, unless the first was
        interrupted.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self.loop.close()
            self.engine.close()
        except BaseException:  # Ctrl-C, or Terminated
            self.closed = False
            raise
        self.finalizer.detach()

    def __enter__(self) -> LLM:
        self.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def warn_and_abandon(loop: Any, model: str) -> None:
    """Stop the loop of an LLM that nobody refers to any more, and say so."""
    try:
        LOG.warning(
            log_event(
                "an LLM was dropped without close()",
                model=shorten(model),
                use="close(), or with LLM(...)",
            )
        )
        repair = "close it, or use `with LLM(...) as llm:`"
        warnings.warn(
            f"an LLM ({shorten(model)}) was dropped without close(); {repair}",
            ResourceWarning,
            stacklevel=2,
        )
    finally:
        loop.abandon()


def make_config(
    model: str | None, config: EngineConfig | str | Path | None, settings: dict[str, Any]
) -> EngineConfig:
    """The configuration that the keywords of `LLM` ask for.   raises: UsageError"""
    if model is not None:
        settings = {"model": model, **settings}
    if isinstance(config, EngineConfig):
        if settings:
            raise UsageError(
                "give LLM an EngineConfig or keywords, not both: got config and "
                f"{', '.join(settings)}"
            )
        return config
    if isinstance(config, str | Path):
        settings = {"config": str(config), **settings}
    elif config is not None:
        raise UsageError(
            f"config must be a file's path or an EngineConfig, got {describe_type(config)}; "
            "settings are keywords"
        )
    return make_engine_config(**settings)
