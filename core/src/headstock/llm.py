"""The engine as a Python object: prompts in, text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast, overload

from headstock.config import EngineConfig, make_engine_config
from headstock.errors import UsageError, describe_type
from headstock.outputs import EmbeddingRequestOutput, RequestOutput
from headstock.requests.batch_params import (
    ParamsInput,
    RequestParams,
    list_params,
    name_prompt_in_errors,
)
from headstock.requests.engine_protocol import StartEngine
from headstock.requests.foreign_names import drop_foreign_options, explain_missing_method
from headstock.requests.progress_bars import UseTqdm, prompt_bar
from headstock.requests.prompt_request import PromptRequest
from headstock.requests.session import EngineSession, start_engine
from headstock.sampling_params import SamplingParams
from headstock.text.conversation import ChatOptions, Conversation, make_conversation
from headstock.text.messages import Message
from headstock.text.prompt import PromptType, list_prompts

__all__ = ["LLM", "get_session", "start_engine"]

_FEW_TOKENS = 4096
"""Ids of a prompt that are checked on the event loop: 0.1 ms."""

SettingValue = bool | int | float | str | Path | Sequence[str] | Sequence[int] | None
"""A value of a setting, as it is or as text that a flag would take."""


class LLM:
    """A model ready to generate; close it, or use it in a `with` statement, to free its memory.

    An LLM that is dropped without that logs a warning and gives a ResourceWarning; its threads end
    and its memory is freed soon after.

    `settings` are the flags of the command line with underscores (`attn="sdpa"`, `page_size=16`).
    `config` is a file of settings that rank below them, as with `--config`, or an EngineConfig,
    which takes the place of them all. `start` starts the engine, here or elsewhere. Several may
    live in one process, and one may be called from several threads.
    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | str | Path | None = None,
        start: StartEngine = start_engine,
        **settings: SettingValue,
    ) -> None:
        self._session = EngineSession(_make_config(model, config, settings), start)

    if not TYPE_CHECKING:  # or a type checker would take every name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise NotSupported for a method of vLLM's LLM that is not here."""
            raise explain_missing_method(name)

    # Two signatures for type checkers: of a union they could not tell what a list literal holds.
    @overload
    def generate(
        self,
        prompts: PromptType,
        sampling_params: ParamsInput = None,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[PromptType],
        sampling_params: ParamsInput = None,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsInput = None,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """The answers to the prompts, in their order. All are checked before any runs.

        `sampling_params` may be mappings of the names of SamplingParams.
        Prompts of lower `priority` go first and, where rows or pages are short, preempt others (0
        by default). An answer that fails while it runs has finish_reason "error", and the others go
        on. `use_tqdm` draws a bar on standard error: True with `tqdm.auto`, a callable with the bar
        that it makes. `others` are keywords of vLLM's, taken as far as they change nothing.
        raises: RequestError naming the prompt at fault, UsageError after `close`, NotSupported,
            EngineDied
        """
        drop_foreign_options(others, "generate")
        # Checked whole before any runs, so that a bad last prompt costs no answers.
        prompt_requests = self._session.input_processor.process_batch(
            list_prompts(prompts), sampling_params, priority
        )
        return self._run(prompt_requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsInput = None,
        use_tqdm: UseTqdm = False,
        *,
        split_answers: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """As `generate`, of one conversation or several through the model's chat template.

        Without `sampling_params`, and a `max_new_tokens` of the model's, answers may fill the
        context. One that is cut there, or by `max_tokens`, has finish_reason "length".
        The options are those of `headstock.text.conversation.ChatOptions`. `text` is what the model
        wrote. With `split_answers`, `reasoning` and `tool_calls` of outputs have theirs, and `text`
        the rest.
        raises: UsageError when there is no template, RequestError, ModelError, EngineDied
        """
        # By the first element: a conversation is a list of mappings, several are a list of lists.
        are_several = (
            isinstance(messages, list | tuple)
            and bool(messages)
            and isinstance(messages[0], list | tuple)
        )
        conversations = cast("Sequence[Sequence[Message]]", messages if are_several else [messages])
        params_list = list_params(sampling_params, len(conversations))
        prompt_requests = []
        for index, conversation in enumerate(conversations):
            with name_prompt_in_errors(index, len(conversations)):
                prompt_requests.append(
                    self._session.input_processor.process_chat(
                        _read_chat(conversation, options),
                        params_list[index],
                        divides=split_answers,
                    )
                )
        return self._run(prompt_requests, use_tqdm)

    @overload
    def embed(
        self,
        prompts: PromptType,
        pooling: str | None = None,
        normalize: bool | None = None,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]: ...

    @overload
    def embed(
        self,
        prompts: Sequence[PromptType],
        pooling: str | None = None,
        normalize: bool | None = None,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]: ...

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling: str | None = None,
        normalize: bool | None = None,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of the prompts, in their order, at `output.outputs.embedding`.

        They are made of the hidden states after the model's last norm. `pooling` says of which:
        "last" is that of the last token, "mean" the mean of all. `normalize` gives them length 1.
        Without either, they are as the checkpoint's modules.json says; without that, "last" and of
        length 1. `prompt_name` puts the checkpoint's instruction of this name before each text.
        `use_tqdm` and `priority` are as in `generate`. A prompt that fails while it runs has no
        numbers and says why in `outputs.error`, and the others go on.
        raises: RequestError naming the prompt at fault, UsageError after `close`, EngineDied
        """
        requests = self._session.input_processor.process_embeddings(
            list_prompts(prompts),
            pooling,
            normalize=normalize,
            prompt_name=prompt_name,
            priorities=priority,
        )
        with (
            prompt_bar(use_tqdm, len(requests)) as advance,
            closing(self._session.stream_embeddings(requests)) as outputs,
        ):
            for _, _ in outputs:
                advance(True, 0)
        return [request.final_output() for request in requests]

    def _run(
        self, prompt_requests: Sequence[PromptRequest], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """The whole outputs of `prompt_requests`, in their order.

        raises: RequestError before any runs, UsageError, EngineDied
        """
        self._session.check_open()
        self._session.check_requests(prompt_requests)
        answers: dict[str, RequestOutput] = {}
        with (
            prompt_bar(use_tqdm, len(prompt_requests)) as advance,
            # Closed here: after Ctrl-C a generator would only be closed once it is collected.
            closing(self._session.stream_outputs(prompt_requests, stream_tokens=False)) as outputs,
        ):
            for prompt_request, piece in outputs:
                advance(prompt_request.is_finished, piece.num_output_tokens)
                # As each ends, while the device computes tokens of others.
                if prompt_request.is_finished:
                    answers[prompt_request.request_id] = prompt_request.final_output()
        return [answers[prompt_request.request_id] for prompt_request in prompt_requests]

    def stream(
        self, prompt: PromptType, sampling_params: RequestParams = None, priority: int = 0
    ) -> Iterator[RequestOutput]:
        """The answer in pieces: each output holds the new tokens alone.

        Closing the iterator ends the request.
        raises: RequestError and UsageError at once, EngineDied
        """
        return self._session.stream(prompt, sampling_params, priority)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: RequestParams = None,
        priority: int = 0,
        *,
        split_answers: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """As `stream`, of one conversation; the options are those of `chat`.

        raises: UsageError, RequestError and ModelError at once, EngineDied
        """
        return self._session.stream_request(
            self._session.input_processor.process_chat(
                _read_chat(messages, options),
                sampling_params,
                priority,
                divides=split_answers,
            )
        )

    async def generate_async(
        self, prompt: PromptType, sampling_params: RequestParams = None, priority: int = 0
    ) -> RequestOutput:
        """The whole answer to one prompt; cancelling the task ends the request.

        raises: RequestError, UsageError after `close`, EngineDied
        """
        prompt_request = await self._process_async(prompt, sampling_params, priority)
        # Tokens that nothing reads until the end would cost the engine an update each.
        outputs = self._session.stream_outputs_async(prompt_request, stream_tokens=False)
        async with aclosing(outputs):
            async for _ in outputs:
                pass
        return prompt_request.final_output()

    async def astream(
        self, prompt: PromptType, sampling_params: RequestParams = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """As `stream`, for asyncio; cancelling the task or closing the iterator ends the request.

        Tokens of a completion that come while the caller is busy are one piece, but for the first
        one and where the text may end it, by a stop string or a call.
        raises: RequestError, UsageError after `close`, EngineDied
        """
        prompt_request = await self._process_async(prompt, sampling_params, priority)
        async with aclosing(self._session.stream_outputs_async(prompt_request)) as outputs:
            async for _, piece in outputs:
                yield piece

    async def astream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: RequestParams = None,
        priority: int = 0,
        *,
        split_answers: bool = False,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[RequestOutput]:
        """As `stream_chat`, for asyncio; cancelling the task or closing the iterator ends the
        request.

        raises: UsageError, RequestError, ModelError, EngineDied
        """
        prompt_request = await asyncio.to_thread(
            self._session.input_processor.process_chat,
            _read_chat(messages, options),
            sampling_params,
            priority,
            divides=split_answers,
        )
        await asyncio.to_thread(self._session.check_requests, [prompt_request])
        async with aclosing(self._session.stream_outputs_async(prompt_request)) as outputs:
            async for _, piece in outputs:
                yield piece

    async def _process_async(
        self, prompt: PromptType, params: RequestParams, priority: int
    ) -> PromptRequest:
        """The checked request.   raises: RequestError"""

        def process() -> PromptRequest:
            request = self._session.input_processor.process(prompt, params, priority)
            self._session.check_requests([request])
            return request

        # The way to a thread and back delays a first token more than a check of these.
        is_short = isinstance(prompt, list | tuple) and len(prompt) <= _FEW_TOKENS
        has_grammar = params is not None and (
            not isinstance(params, SamplingParams) or params.structured_outputs is not None
        )
        if is_short and not has_grammar:
            return process()
        # Long texts take milliseconds, which would hold up other streams of the event loop, and
        # grammars, which a mapping may hold too, may take seconds.
        return await asyncio.to_thread(process)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, from transformers.   raises: ModelError without one"""
        return self._session.tokenizer.hf_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a prompt without parameters has: those of the model's generation_config.json."""
        return self._session.default_params

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes before requests that come later.   raises: UsageError, EngineDied"""
        self._session.check_open()
        self._session.loop.reset_prefix_cache()

    def close(self) -> None:
        """End the requests that run and free the memory.

        A second call does nothing, unless the first was interrupted.
        """
        self._session.close()

    def __enter__(self) -> LLM:
        self._session.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def get_session(llm: LLM) -> EngineSession:
    """The session behind `llm`, for tools that look at the engine."""
    return llm._session


def _read_chat(messages: Sequence[Message], options: Mapping[str, Any]) -> Conversation:
    """The conversation that keywords give, without those of vLLM's that change nothing.

    raises: RequestError, NotSupported, ModelError, UsageError
    """
    return make_conversation(messages, drop_foreign_options(options, "chat"))


def _make_config(
    model: str | None, config: EngineConfig | str | Path | None, settings: dict[str, SettingValue]
) -> EngineConfig:
    """The configuration that the keywords of `LLM` spell.   raises: UsageError"""
    if model is not None:
        settings = {"model": model, **settings}
    if isinstance(config, EngineConfig):
        # Neither could win: an EngineConfig is complete, so a keyword beside it contradicts it.
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
            f"config: expected a file's path or an EngineConfig, got {describe_type(config)}; "
            "settings are keywords"
        )
    return make_engine_config(**settings)
