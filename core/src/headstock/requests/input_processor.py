"""Prompts and parameters, checked against one engine and made into prompt requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from headstock.config.spelling import Spelling
from headstock.errors import RequestError, describe_type, shorten
from headstock.requests.engine_protocol import StartedEngine
from headstock.requests.prompt_request import PromptRequest
from headstock.sampling_checks import check_priority
from headstock.sampling_params import SamplingParams
from headstock.text.chat import Message, render_chat
from headstock.text.generation_config import read_generation_config
from headstock.text.prompt import Prompt, PromptType, check_ids, check_prompt, tokenize_prompt
from headstock.text.tokenizer import NoTokenizer, open_tokenizer

ParamsInput = SamplingParams | Sequence[SamplingParams] | None
"""Parameters of all prompts, or of each; None is the model's defaults."""


class InputProcessor:
    """Makes prompt requests for `engine`.

    A request without a seed gets the next of the random numbers that `seed` begins. `template`
    takes the place of the model's chat template. Errors name settings as `spelling` does.
    raises: ModelError
    """

    def __init__(
        self, engine: StartedEngine, seed: int, spelling: Spelling, template: str | None = None
    ) -> None:
        self.engine = engine
        self.spelling = spelling
        self.template = template
        self.tokenizer = open_tokenizer(engine.directory)
        generation_config = read_generation_config(engine.directory)
        self.default_params = generation_config.params
        # generation_config.json wins over config.json, as in transformers. The tokenizer's token
        # counts too: some chat models end a turn with one that neither file lists.
        self.eos_ids = tuple(
            dict.fromkeys((*(generation_config.eos_ids or engine.eos_ids), *self.tokenizer.eos_ids))
        )
        self.request_numbers = itertools.count()
        self.seeds = random.Random(seed)

    def render_chat(
        self,
        messages: Sequence[Message],
        template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> Prompt:
        """The prompt that `template`, the engine's or the model's makes of `messages`.

        The template sees the variables in `template_kwargs`.
        raises: UsageError, RequestError, ModelError
        """
        with self.spelling.render_errors():
            text = render_chat(
                self.tokenizer,
                messages,
                template=self.template if template is None else template,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=template_kwargs,
            )
        # The template has written the special tokens out already.
        return tokenize_prompt(text, self.tokenizer, add_special_tokens=False)

    def process(
        self, prompt: PromptType, params: SamplingParams | None = None, priority: int = 0
    ) -> PromptRequest:
        """The request for a checked prompt. A lower `priority` goes first, as in vLLM.

        raises: RequestError
        """
        with self.spelling.render_errors():
            return self._make_request(prompt, params, priority)

    def _make_request(
        self, prompt: PromptType, params: SamplingParams | None, priority: int
    ) -> PromptRequest:
        """As `process`; errors name settings by their flags.   raises: RequestError"""
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {describe_type(params)}",
                "sampling_params",
            )
        tokenized = tokenize_prompt(prompt, self.tokenizer)
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError(
                f"stop needs text; {self.tokenizer.reason} and stop_token_ids", "stop"
            )
        self._check_token_ids(tokenized, params)
        stop_ids = (
            params.stop_token_ids if params.ignore_eos else (*self.eos_ids, *params.stop_token_ids)
        )
        check_some_allowed(params, stop_ids)
        return PromptRequest(
            str(next(self.request_numbers)),
            tokenized,
            params,
            # The scheduler's order is the other way round: a higher number goes first.
            priority=-check_priority(priority),
            tokenizer=self.tokenizer,
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            max_output_tokens=self.engine.max_seq_len - len(tokenized.tokens),
            seed=self.seeds.getrandbits(63) if params.seed is None else params.seed,
        )

    def _check_token_ids(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RequestError when the model does not know an id, or the prompt is too long."""
        vocab = self.engine.model.vocab
        if prompt.text is not None and max(prompt.tokens, default=0) >= vocab:
            raise RequestError(
                f"the tokenizer makes token {max(prompt.tokens)} of this text, and the model "
                f"knows {vocab}: is it the model's own tokenizer?",
                "prompt",
            )
        check_prompt(
            prompt.tokens,
            vocab=vocab,
            max_seq_len=self.engine.max_seq_len,
            length_hint=self.engine.length_hint,
        )
        check_ids(params.stop_token_ids, "stop_token_ids", vocab)
        check_ids(params.allowed_token_ids or (), "allowed_token_ids", vocab)
        check_ids(tuple(params.logit_bias or ()), "logit_bias", vocab)

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
        params_list: list[SamplingParams | None]
        if isinstance(params, list | tuple):
            params_list = list(params)
        else:  # `process` refuses other types
            params_list = [cast("SamplingParams | None", params)] * count
        if len(params_list) != count:
            raise RequestError(
                f"wanted one sampling_params or one for each prompt ({count}), got "
                f"{len(params_list)}",
                "sampling_params",
            )
        priority_list = [0] * count if priorities is None else priorities
        if not isinstance(priority_list, list | tuple) or len(priority_list) != count:
            is_list = isinstance(priorities, list | tuple)
            got = f"{len(priority_list)}" if is_list else describe_type(priorities)
            raise RequestError(
                f"priority must be a list with a number for each prompt ({count}), got {got}",
                "priority",
            )
        prompt_requests = []
        for index in range(count):
            with name_prompt_in_errors(index, count):
                prompt_requests.append(
                    self.process(prompts[index], params_list[index], priority_list[index])
                )
        return prompt_requests


def check_some_allowed(params: SamplingParams, stop_ids: Sequence[int]) -> None:
    """Raise RequestError when no token at all could be sampled before `min_tokens` are out."""
    if (
        params.min_tokens
        and params.allowed_token_ids is not None
        and set(params.allowed_token_ids) <= set(stop_ids)
    ):
        raise RequestError(
            f"min_tokens ({params.min_tokens}) forbids tokens that end the answer until then, and "
            f"allowed_token_ids ({shorten(list(params.allowed_token_ids))}) has no others; allow "
            "one more token or leave min_tokens out",
            "allowed_token_ids",
        )


@contextmanager
def name_prompt_in_errors(index: int, count: int) -> Iterator[None]:
    """A RequestError that leaves this block says which of `count` prompts is at fault."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"prompts[{index}]: {error}", parameter=error.parameter) from error
