"""Prompts and parameters, checked against one engine and made into jobs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from headstock.config.spelling import Spelling
from headstock.errors import RequestError, describe_type, shorten
from headstock.requests.prompt_request import Job
from headstock.sampling_checks import check_priority
from headstock.sampling_params import SamplingParams
from headstock.text.chat import Message, chat_prompt
from headstock.text.generation_config import read_generation_config
from headstock.text.prompt import Prompt, PromptInput, as_prompt, check_ids, check_prompt
from headstock.text.tokenizer import NoTokenizer, open_tokenizer

if TYPE_CHECKING:
    from headstock.engine.engine import Engine

Params = SamplingParams | Sequence[SamplingParams] | None
P = ParamSpec("P")
T = TypeVar("T")


class Intake:
    """Makes jobs for `engine`; those that name no seed get one each from a row that `seed` begins.

    `template` takes the place of the model's chat template. Errors name settings as `spelling`
    does.
    raises: ModelError
    """

    def __init__(
        self, engine: Engine, seed: int, spelling: Spelling, template: str | None = None
    ) -> None:
        self.engine = engine
        self.spelling = spelling
        self.template = template
        self.tokenizer = open_tokenizer(engine.directory)
        wishes = read_generation_config(engine.directory)
        self.defaults = wishes.sampling
        self.eos_ids = tuple(
            dict.fromkeys((*(wishes.eos_ids or engine.eos_ids), *self.tokenizer.eos_ids))
        )
        self.numbers = itertools.count()
        self.seeds = random.Random(seed)

    def chat_prompt(self, messages: Sequence[Message], template: str | None = None) -> Prompt:
        """The prompt that `template`, the engine's or the model's makes of `messages`.

        raises: UsageError, RequestError, ModelError
        """
        with self.spelling.render_errors():
            text = chat_prompt(
                self.tokenizer, messages, template=self.template if template is None else template
            )
        return as_prompt(text, self.tokenizer, add_special_tokens=False)

    def job(
        self, given: PromptInput, params: SamplingParams | None = None, priority: int = 0
    ) -> Job:
        """The checked prompt; of lower `priority` goes first, as in vLLM.   raises: RequestError"""
        with self.spelling.render_errors():
            return self._make_job(given, params, priority)

    def _make_job(self, given: PromptInput, params: SamplingParams | None, priority: int) -> Job:
        """As `job`; errors name settings by their flags.   raises: RequestError"""
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {describe_type(params)}",
                "sampling_params",
            )
        prompt = as_prompt(given, self.tokenizer)
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError(
                f"stop needs text; {self.tokenizer.reason} and stop_token_ids", "stop"
            )
        vocab, longest = self.engine.model.vocab, self.engine.max_seq_len
        if prompt.text is not None and max(prompt.tokens, default=0) >= vocab:
            made = f"the tokenizer makes token {max(prompt.tokens)} of this text"
            raise RequestError(
                f"{made}, and the model knows {vocab}: is it the model's own tokenizer?", "prompt"
            )
        check_prompt(prompt.tokens, vocab=vocab, max_seq_len=longest, longer=self.engine.longer)
        check_ids(params.stop_token_ids, "stop_token_ids", vocab)
        check_ids(params.allowed_token_ids or (), "allowed_token_ids", vocab)
        check_ids(tuple(params.logit_bias or ()), "logit_bias", vocab)
        stop_ids = (
            params.stop_token_ids if params.ignore_eos else (*self.eos_ids, *params.stop_token_ids)
        )
        check_some_allowed(params, stop_ids)
        return Job(
            str(next(self.numbers)),
            prompt,
            params,
            rank=-check_priority(priority),
            tokenizer=self.tokenizer,
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            room=longest - len(prompt.tokens),
            seed=self.seeds.getrandbits(63) if params.seed is None else params.seed,
        )

    def jobs(
        self, prompts: Sequence[PromptInput], params: Params, priority: Sequence[int] | None = None
    ) -> list[Job]:
        """A job for each prompt.   raises: RequestError naming the prompt at fault"""
        count = len(prompts)
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * count
        if len(each) != count:
            raise RequestError(
                f"wanted one sampling_params or one for each prompt ({count}), got {len(each)}",
                "sampling_params",
            )
        ranks = [0] * count if priority is None else priority
        if not isinstance(ranks, list | tuple) or len(ranks) != count:
            wanted = f"a list with a number for each prompt ({count})"
            got = (
                f"{len(priority)}"
                if isinstance(priority, list | tuple)
                else describe_type(priority)
            )
            raise RequestError(f"priority must be {wanted}, got {got}", "priority")
        return [
            located(index, count, self.job, prompts[index], each[index], ranks[index])
            for index in range(count)
        ]


def check_some_allowed(params: SamplingParams, stop_ids: Sequence[int]) -> None:
    """Raise RequestError when no token at all could be chosen before `min_tokens` are out."""
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


def located(
    index: int, count: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The function's result; its RequestError says which of `count` prompts is at fault."""
    try:
        return function(*args, **kwargs)
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"prompts[{index}]: {error}", parameter=error.parameter) from error
