"""Prompts and parameters, checked against one engine and made into prompt requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from attrs import evolve

from headstock.errors import RequestError, describe_type
from headstock.requests.answer_formats import AnswerFormats
from headstock.requests.embedding_request import EmbeddingRequest, check_pooling_kind
from headstock.requests.engine_protocol import StartedEngine
from headstock.requests.prompt_request import PromptRequest
from headstock.sampling_checks import check_priority, check_room, check_some_allowed
from headstock.sampling_params import SamplingParams
from headstock.scheduler.request import PoolingKind
from headstock.text.answer import AnswerFormat
from headstock.text.chat import find_template, render_chat
from headstock.text.conversation import Conversation
from headstock.text.forced_call import force_call
from headstock.text.generation_config import read_generation_config
from headstock.text.prompt import (
    Prompt,
    PromptType,
    check_ids,
    check_prompt,
    check_salt,
    tokenize_prompt,
)
from headstock.text.template_variables import UnreadNotices, list_variables
from headstock.text.tokenizer import NoTokenizer, open_tokenizer

RequestParams = SamplingParams | Mapping[str, Any] | None
"""Parameters of a request; a mapping is `SamplingParams(**mapping)`, None the model's defaults."""

ParamsInput = RequestParams | Sequence[RequestParams]
"""Parameters of all prompts, or of each."""


class InputProcessor:
    """Makes prompt requests for `engine`.

    A request without a seed gets the next of the random numbers that `seed` begins. `template`
    takes the place of the model's chat template.
    raises: ModelError
    """

    def __init__(
        self,
        engine: StartedEngine,
        seed: int,
        template: str | None = None,
        answer_formats: AnswerFormats | None = None,
    ) -> None:
        self.engine = engine
        self.template = template
        self.answer_formats = answer_formats or AnswerFormats()
        self.tokenizer = open_tokenizer(engine.directory)
        generation_config = read_generation_config(engine.directory)
        self.default_params = generation_config.params
        self.default_chat_params = generation_config.chat_params
        # generation_config.json wins over config.json, as in transformers. The tokenizer's token
        # counts too: some chat models end a turn with one that neither file lists.
        self.eos_ids = tuple(
            dict.fromkeys((*(generation_config.eos_ids or engine.eos_ids), *self.tokenizer.eos_ids))
        )
        self.unread_notices = UnreadNotices()
        self.request_numbers = itertools.count()
        self.seeds = random.Random(seed)

    def render_chat(self, conversation: Conversation) -> Prompt:
        """The prompt that its own template, the engine's or the model's makes of a conversation.

        raises: UsageError, RequestError, ModelError
        """
        variables = dict(conversation.chat_template_kwargs or {})
        if conversation.reasoning_effort is not None:
            read = list_variables(self.find_template(conversation))
            if read is not None and "reasoning_effort" not in read:
                raise RequestError(
                    "reasoning_effort is not supported: the chat template does not read it; leave "
                    "it out",
                    "reasoning_effort",
                )
            variables["reasoning_effort"] = conversation.reasoning_effort
        text = render_chat(
            self.tokenizer,
            conversation.messages,
            template=conversation.chat_template or self.template,
            tools=conversation.offered_tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            template_kwargs=variables,
        )
        if variables:
            self.unread_notices.say(variables, self.find_template(conversation))
        # The template has written the special tokens out already.
        return self.tokenize(text, add_special_tokens=False)

    def tokenize(self, prompt: PromptType, *, add_special_tokens: bool = True) -> Prompt:
        """The prompt as token ids, of which there may be too many.

        raises: RequestError, also for a text that has far too many
        """
        return tokenize_prompt(
            prompt,
            self.tokenizer,
            add_special_tokens=add_special_tokens,
            max_seq_len=self.engine.max_seq_len,
            length_hint=self.engine.length_hint,
        )

    def find_template(self, conversation: Conversation) -> str:
        """The text of the template that writes a conversation.   raises: UsageError, ModelError"""
        return find_template(
            self.tokenizer,
            conversation.chat_template or self.template,
            has_tools=bool(conversation.offered_tools),
        )

    def process_chat(
        self,
        conversation: Conversation,
        params: RequestParams = None,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
        divides: bool = False,
    ) -> PromptRequest:
        """The request for a conversation. With `divides`, its outputs have reasoning and calls of
        tools separate from the text.

        raises: UsageError, RequestError, ModelError
        """
        prompt = evolve(self.render_chat(conversation), cache_salt=check_salt(cache_salt))
        params = self._copy_params(params, self.default_chat_params)
        if conversation.forced_tools:
            params = force_call(params, conversation.forced_tools)
        elif conversation.offered_tools and params.structured_outputs is not None:
            raise RequestError(
                "structured_outputs cannot be combined with tools that the model may call: a call "
                'has another structure; give tool_choice "none" or leave one of the two out',
                "structured_outputs",
            )
        answer_format = (
            self.answer_formats.make_format(
                conversation,
                self.find_template(conversation),
                prompt.text or "",
                self.tokenizer,
            )
            if divides
            else None
        )
        outputs = params.structured_outputs
        if outputs is not None and answer_format is not None:
            outputs, answer_format = self.answer_formats.delay_structure(
                outputs, answer_format, self.tokenizer
            )
            params = params.replace({"structured_outputs": outputs})
        return self._make_request(prompt, params, priority, answer_format)

    def process(
        self, prompt: PromptType, params: RequestParams = None, priority: int = 0
    ) -> PromptRequest:
        """The request for a checked prompt. A lower `priority` goes first, as in vLLM.

        raises: RequestError
        """
        params = self._copy_params(params, self.default_params)
        return self._make_request(prompt, params, priority)

    def _copy_params(self, params: RequestParams, defaults: SamplingParams) -> SamplingParams:
        """A checked copy of the parameters, `defaults` for None.   raises: RequestError"""
        params = defaults if params is None else params
        if isinstance(params, Mapping):
            return SamplingParams().replace(params)
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "sampling_params: expected SamplingParams or a mapping of its names, got "
                f"{describe_type(params)}",
                "sampling_params",
            )
        return params.copy_checked()  # the caller's may change while the request runs

    def _make_request(
        self,
        prompt: PromptType,
        params: SamplingParams,
        priority: int,
        answer_format: AnswerFormat | None = None,
    ) -> PromptRequest:
        """As `process`, with parameters that no caller changes.

        raises: RequestError
        """
        if self.engine.summary.no_text:
            raise RequestError(
                f"this model gives no text: {self.engine.summary.no_text}; ask for vectors "
                "(LLM.embed, /v1/embeddings)"
            )
        tokenized = self.tokenize(prompt)
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError(
                f"stop needs text; {self.tokenizer.reason} and stop_token_ids", "stop"
            )
        self._check_token_ids(tokenized, params)
        stop_ids = (
            params.stop_token_ids if params.ignore_eos else (*self.eos_ids, *params.stop_token_ids)
        )
        check_some_allowed(params.min_tokens, params.allowed_token_ids, stop_ids)
        max_output_tokens = self.engine.max_seq_len - len(tokenized.tokens)
        check_room(params.min_tokens, max_output_tokens, self.engine.length_hint)
        if self.engine.request_args is not None:
            self.engine.request_args.make(params.extra_args)
        return PromptRequest(
            str(next(self.request_numbers)),
            tokenized,
            params,
            # The scheduler's order is the other way round: a higher number goes first.
            priority=-check_priority(priority),
            tokenizer=self.tokenizer,
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            max_output_tokens=max_output_tokens,
            seed=self.seeds.getrandbits(63) if params.seed is None else params.seed,
            answer_format=answer_format,
        )

    def process_embedding(
        self,
        prompt: PromptType,
        pooling: str,
        *,
        normalize: bool,
        priority: int = 0,
        user: str = "",
    ) -> EmbeddingRequest:
        """The request for the vector of a checked prompt; `priority` as in `process`.

        raises: RequestError
        """
        check_pooling_kind(pooling)
        tokenized = self.tokenize(prompt)
        self._check_prompt(tokenized, num_outputs=0)
        return EmbeddingRequest(
            str(next(self.request_numbers)),
            tokenized,
            cast("PoolingKind", pooling),
            normalize=normalize,
            priority=-check_priority(priority),
            user=user,
        )

    def _check_token_ids(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RequestError when the model does not know an id, or the prompt is too long."""
        vocab = self.engine.model.vocab
        self._check_prompt(prompt, num_outputs=1)
        check_ids(params.stop_token_ids, "stop_token_ids", vocab)
        check_ids(params.allowed_token_ids or (), "allowed_token_ids", vocab)
        check_ids(tuple(params.logit_bias or ()), "logit_bias", vocab)
        outputs = params.structured_outputs
        if outputs is not None and outputs.after_reasoning is not None:
            reasoning = outputs.after_reasoning
            ids = (reasoning.end,) if reasoning.start is None else (reasoning.start, reasoning.end)
            check_ids(ids, "structured_outputs.after_reasoning", vocab)

    def _check_prompt(self, prompt: Prompt, *, num_outputs: int) -> None:
        """Raise RequestError unless the model knows the tokens, and `num_outputs` more fit."""
        vocab = self.engine.model.vocab
        if prompt.text is not None and max(prompt.tokens, default=0) >= vocab:
            raise RequestError(
                f"the tokenizer makes token {max(prompt.tokens)} of this text, and the model "
                f"knows {vocab}: is it the model's own tokenizer?",
                "prompt",
            )
        check_prompt(
            prompt,
            vocab=vocab,
            max_seq_len=self.engine.max_seq_len,
            length_hint=self.engine.length_hint,
            num_outputs=num_outputs,
        )

    def process_batch(
        self,
        prompts: Sequence[PromptType],
        params: ParamsInput,
        priorities: Sequence[int] | None = None,
    ) -> list[PromptRequest]:
        """A request for each prompt, in their order.

        raises: RequestError, which names the prompt at fault
        """
        count = len(prompts)
        params_list = list_params(params, count)
        priority_list = list_priorities(priorities, count)
        prompt_requests = []
        # Most batches have one object for all prompts: a copy of it takes as long as its checks.
        copies: dict[int, SamplingParams] = {}
        for index, params in enumerate(params_list):
            with name_prompt_in_errors(index, count):
                if id(params) not in copies:
                    copies[id(params)] = self._copy_params(params, self.default_params)
                prompt_requests.append(
                    self._make_request(prompts[index], copies[id(params)], priority_list[index])
                )
        return prompt_requests

    def process_embeddings(
        self,
        prompts: Sequence[PromptType],
        pooling: str,
        *,
        normalize: bool,
        priorities: Sequence[int] | None = None,
        user: str = "",
    ) -> list[EmbeddingRequest]:
        """A request for the vector of each prompt, in their order.

        raises: RequestError, which names the prompt at fault
        """
        count, embedding_requests = len(prompts), []
        priority_list = list_priorities(priorities, count)
        for index in range(count):
            with name_prompt_in_errors(index, count):
                embedding_requests.append(
                    self.process_embedding(
                        prompts[index],
                        pooling,
                        normalize=normalize,
                        priority=priority_list[index],
                        user=user,
                    )
                )
        return embedding_requests


def list_priorities(priorities: Sequence[int] | None, count: int) -> Sequence[int]:
    """The priority of each of `count` prompts, 0 by default.   raises: RequestError"""
    if priorities is None:
        return [0] * count
    if not isinstance(priorities, list | tuple) or len(priorities) != count:
        is_list = isinstance(priorities, list | tuple)
        got = f"{len(priorities)}" if is_list else describe_type(priorities)
        raise RequestError(
            f"priority: expected a list with a number for each prompt ({count}), got {got}",
            "priority",
        )
    return priorities


def list_params(params: ParamsInput, count: int) -> list[RequestParams]:
    """The parameters of each of `count` prompts.   raises: RequestError"""
    if not isinstance(params, list | tuple):  # `process` refuses other types
        return [cast("RequestParams", params)] * count
    if len(params) != count:
        raise RequestError(
            f"expected one sampling_params or one for each prompt ({count}), got {len(params)}",
            "sampling_params",
        )
    return list(params)


@contextmanager
def name_prompt_in_errors(index: int, count: int) -> Iterator[None]:
    """A RequestError that leaves this block says which of `count` prompts is at fault."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"prompts[{index}]: {error}", parameter=error.parameter) from error
