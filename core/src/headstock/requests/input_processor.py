"""Prompts and parameters, checked against one engine and made into prompt requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import cast

from attrs import evolve

from headstock.errors import RequestError, describe_type
from headstock.requests.answer_formats import AnswerFormats
from headstock.requests.batch_params import (
    ParamsInput,
    RequestParams,
    list_params,
    list_priorities,
    name_prompt_in_errors,
)
from headstock.requests.chat_structure import rule_answer
from headstock.requests.closed_objects import close_params
from headstock.requests.embedding_request import EmbeddingRequest, check_pooling_kind
from headstock.requests.engine_protocol import StartedEngine
from headstock.requests.prompt_request import PromptRequest
from headstock.sampling_checks import check_priority, check_room, check_some_allowed
from headstock.sampling_params import SamplingParams
from headstock.scheduler.request import PoolingKind
from headstock.text.answer import AnswerFormat
from headstock.text.chat import find_template, render_chat
from headstock.text.conversation import Conversation
from headstock.text.embedding_config import read_embedding_config
from headstock.text.generation_config import read_generation_config
from headstock.text.prompt import (
    Prompt,
    PromptType,
    check_ids,
    check_prompt,
    check_salt,
    instruct_prompt,
    read_prompt,
    tokenize_end,
    tokenize_prompt,
)
from headstock.text.template_variables import UnreadNotices, list_variables
from headstock.text.tokenizer import NoTokenizer, open_tokenizer


class InputProcessor:
    """Makes prompt requests for `engine`.

    A request without a seed gets the next of the random numbers that `seed` begins. `template`
    takes the place of the model's chat template. Objects of structured outputs are closed, unless
    `open_objects`.
    raises: ModelError
    """

    def __init__(
        self,
        engine: StartedEngine,
        seed: int,
        template: str | None = None,
        answer_formats: AnswerFormats | None = None,
        *,
        open_objects: bool = False,
    ) -> None:
        self.engine = engine
        self.template = template
        self.answer_formats = answer_formats or AnswerFormats()
        self.open_objects = open_objects
        self.tokenizer = open_tokenizer(engine.directory)
        generation_config = read_generation_config(engine.directory)
        self.default_params = generation_config.params
        self.default_chat_params = generation_config.chat_params
        # generation_config.json wins over config.json, as in transformers. The tokenizer's token
        # counts too: some chat models end a turn with one that neither file lists.
        self.eos_ids = tuple(
            dict.fromkeys((*(generation_config.eos_ids or engine.eos_ids), *self.tokenizer.eos_ids))
        )
        self.embedding_config = read_embedding_config(engine.directory)
        self.unread_notices = UnreadNotices()
        self.request_numbers = itertools.count()
        self.seeds = random.Random(seed)

    def render_chat(self, conversation: Conversation, num_kept: int | None = None) -> Prompt:
        """The prompt that its own template, the engine's or the model's makes of a conversation.

        num_kept: only the last tokens are kept, so many at most; the text stays whole
        raises: UsageError, RequestError, ModelError
        """
        variables = dict(conversation.chat_template_kwargs or {})
        if conversation.reasoning_effort is not None:
            if not self.reads_effort(conversation):
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
            documents=conversation.documents,
        )
        if variables:
            self.unread_notices.say(variables, self.find_template(conversation))
        # The template has written the special tokens out already.
        if num_kept is None:
            return self.tokenize(text, add_special_tokens=False)
        return Prompt(text, self._tokenize_end(text, num_kept, add_special_tokens=False))

    def cut_prompt(self, prompt: PromptType, num_kept: int) -> Prompt:
        """The prompt with only its last tokens, `num_kept` at most; cut, it has no text.

        raises: RequestError
        """
        whole = prompt if isinstance(prompt, Prompt) else read_prompt(prompt)
        tokens = (
            whole.tokens[-num_kept:]
            if whole.text is None
            else self._tokenize_end(whole.text, num_kept, add_special_tokens=True)
        )
        return Prompt(None, tokens, whole.cache_salt)

    def _tokenize_end(self, text: str, num_kept: int, *, add_special_tokens: bool) -> Sequence[int]:
        """The last tokens of a text.   raises: RequestError"""
        return tokenize_end(
            text,
            self.tokenizer,
            num_kept,
            max_seq_len=self.engine.max_seq_len,
            add_special_tokens=add_special_tokens,
        )

    def reads_effort(self, conversation: Conversation) -> bool:
        """Whether the reasoning effort, if the conversation has one, is read by its template."""
        if conversation.reasoning_effort is None:
            return True
        read = list_variables(self.find_template(conversation))
        return read is None or "reasoning_effort" in read

    def tokenize(self, prompt: PromptType, *, add_special_tokens: bool = True) -> Prompt:
        """The prompt as token ids, possibly too many.

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
        num_kept: int | None = None,
    ) -> PromptRequest:
        """The request for a conversation. With `divides`, its outputs have reasoning and calls of
        tools separate from the text. `num_kept` is as in `render_chat`.

        raises: UsageError, RequestError, ModelError
        """
        prompt = evolve(self.render_chat(conversation, num_kept), cache_salt=check_salt(cache_salt))
        params = self._copy_params(params, self.default_chat_params)
        template = self.find_template(conversation)
        params, forms = rule_answer(
            self.answer_formats,
            conversation,
            params,
            template,
            self.tokenizer,
            open_objects=self.open_objects,
        )
        outputs = params.structured_outputs
        is_strict = outputs is not None and outputs.text_or_calls is not None
        answer_format = (
            self.answer_formats.make_format(
                conversation, template, prompt.text or "", self.tokenizer, forms
            )
            # Strict tools leave room for reasoning even where answers stay whole.
            if divides or is_strict
            else None
        )
        if outputs is not None and answer_format is not None:
            outputs, answer_format = self.answer_formats.delay_structure(
                outputs, answer_format, self.tokenizer
            )
            params = params.replace({"structured_outputs": outputs})
        answer_format = answer_format if divides else None
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
            return self._close_params(SamplingParams().replace(params))
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "sampling_params: expected SamplingParams or a mapping of its names, got "
                f"{describe_type(params)}",
                "sampling_params",
            )
        # The caller's may change while the request runs.
        return self._close_params(params.copy_checked())

    def _close_params(self, params: SamplingParams) -> SamplingParams:
        return params if self.open_objects else close_params(params)

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
        pooling: str | None = None,
        *,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        user: str = "",
    ) -> EmbeddingRequest:
        """The request for the vector of a checked prompt; `priority` as in `process`.

        pooling, normalize: None for those of the checkpoint's own files
        prompt_name: of the checkpoint's instruction before the text
        raises: RequestError
        """
        config = self.embedding_config
        pooling = config.find_pooling(pooling)
        check_pooling_kind(pooling)
        if normalize is None:
            normalize = config.normalize
        instruction = config.find_instruction(prompt_name)
        tokenized = self.tokenize(
            instruct_prompt(prompt, instruction, prompt_name, lowercase=config.lowercase)
        )
        self.check_prompt(tokenized, num_outputs=0)
        config.check_length(len(tokenized.tokens))
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
        self.check_prompt(prompt, num_outputs=1)
        check_ids(params.stop_token_ids, "stop_token_ids", vocab)
        check_ids(params.allowed_token_ids or (), "allowed_token_ids", vocab)
        check_ids(tuple(params.logit_bias or ()), "logit_bias", vocab)
        outputs = params.structured_outputs
        if outputs is not None and outputs.after_reasoning is not None:
            reasoning = outputs.after_reasoning
            ids = (reasoning.end,) if reasoning.start is None else (reasoning.start, reasoning.end)
            check_ids(ids, "structured_outputs.after_reasoning", vocab)

    def check_prompt(self, prompt: Prompt, *, num_outputs: int) -> None:
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
        for token, what in self.engine.summary.placeholders:
            if bool((prompt.ids == token).any()):
                raise RequestError(
                    f"prompt has token {token}, which stands for {what}, and this model is served "
                    "for text alone; leave it out",
                    "prompt",
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
        pooling: str | None = None,
        *,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        priorities: Sequence[int] | None = None,
        user: str = "",
    ) -> list[EmbeddingRequest]:
        """A request for the vector of each prompt, in their order; see `process_embedding`.

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
                        prompt_name=prompt_name,
                        priority=priority_list[index],
                        user=user,
                    )
                )
        return embedding_requests
