"""How one request is sampled.

Names and meanings are vLLM's, so that scripts port by changing an import.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, ClassVar

from attrs import define, evolve, field, fields_dict, setters

from headstock.errors import NotSupported, RequestError, describe_type, find_nearest_name, shorten
from headstock.sampling_checks import (
    DEFAULT_MAX_TOKENS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_USER,
    MIN_REPETITION,
    MIN_SEED,
    IntegerCheck,
    NumberCheck,
    TextCheck,
    TokenIdsCheck,
    check_bool,
    check_extra_args,
    check_logit_bias,
    check_stop_strings,
    make_parameter_error,
    to_arguments,
    to_bias,
    to_ids,
    to_optional_ids,
    to_strings,
)
from headstock.structured_outputs import StructuredOutputsParams, to_structured_outputs


def _make_flag_metadata(
    text: str, default: str = "", *, flag: str = "", aliases: tuple[str, ...] = ()
) -> dict[str, object]:
    """Metadata of a field, from which its flag, its variable and its file key are made.

    `default` says what the default means, where its value does not. Without `flag`, it is
    made of the field's name.
    """
    return {"help": text, "default_text": default, "flag": flag, "aliases": aliases}


FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "bad_words": "logit_bias forbids single tokens",
        "best_of": "ask for n answers, and choose by cumulative_logprob",
        "detokenize": "answers always have text; leave it out",
        "guided_choice": "give structured_outputs={'choice': TEXTS}",
        "guided_decoding": "give structured_outputs=StructuredOutputsParams(...)",
        "guided_decoding_backend": "LLM(grammar=...) chooses the plugin; leave it out",
        "guided_grammar": "give structured_outputs={'grammar': TEXT}",
        "guided_json": "give structured_outputs={'json': SCHEMA}",
        "guided_json_object": "give structured_outputs={'json_object': True}",
        "guided_regex": "give structured_outputs={'regex': TEXT}",
        "guided_whitespace_pattern": "LLM(opt=['llguidance.whitespace=on']) allows white space in "
        "JSON; leave it out",
        "max_completion_tokens": "give max_tokens",
        "output_kind": "LLM.generate gives whole answers, LLM.stream pieces",
        "response_format": "give structured_outputs, such as {'json': SCHEMA}",
        "spaces_between_special_tokens": "leave it out",
        "truncate_prompt_tokens": "shorten the prompt's token ids",
        "use_beam_search": "sample n answers, and choose by cumulative_logprob",
    }
)
"""Parameters of vLLM and OpenAI that headstock lacks -> what to do in their place."""

PENALTY = NumberCheck(
    -MAX_PENALTY, MAX_PENALTY, f"a number between {-MAX_PENALTY:g} and {MAX_PENALTY:g}"
)
POSITIVE_OR_NONE = IntegerCheck(
    1, MAX_COUNT, f"an integer from 1 to {MAX_COUNT}, or none", optional=True
)
LOGPROBS = IntegerCheck(
    0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or none", optional=True
)


@define(kw_only=True, unsafe_hash=True, on_setattr=[setters.convert, setters.validate])
class SamplingParams:
    """How one request is sampled. Fields may be set; a request keeps the values that it began with.

    - `temperature` 0 is greedy; `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off.
    - `max_tokens` None means up to the longest sequence that the engine holds. A larger number
      is cut to that, and the answer then ends with "length".
    - Of `n` answers, answer i is seeded with seed + i; without a seed the engine draws one.
    - `user` says whose the request is, for schedulers. `extra_args` are for plugins that take them.
    - Stop strings are searched for in the text, once `min_tokens` are out. One that holds special
      tokens is searched for as if the text showed those.
    - `structured_outputs` is a `StructuredOutputsParams`, or a mapping of its names.
    - `logprobs` and `prompt_logprobs` count the alternatives that are reported beside the token.

    raises: RequestError for an unknown name or a value out of range
    """

    n: int = field(
        default=1,
        validator=IntegerCheck(1, MAX_N, f"an integer from 1 to {MAX_N}"),
        metadata=_make_flag_metadata("answers to each prompt", flag="-n", aliases=("--n",)),
    )
    temperature: float = field(
        default=1.0,
        validator=NumberCheck(0, MAX_TEMPERATURE, f"a number between 0 and {MAX_TEMPERATURE:g}"),
        metadata=_make_flag_metadata(
            "randomness of sampling; 0 is greedy", "the model's, else 1.0"
        ),
    )
    top_p: float = field(
        default=1.0,
        validator=NumberCheck(0, 1, "a number above 0 and at most 1", above=True),
        metadata=_make_flag_metadata(
            "sample from the smallest set of tokens whose probabilities sum to this",
            "the model's, else 1.0",
        ),
    )
    top_k: int = field(
        default=0,
        validator=IntegerCheck(
            -1, MAX_COUNT, f"an integer from 1 to {MAX_COUNT}, or 0 or -1 for off"
        ),
        metadata=_make_flag_metadata(
            "sample from this many likeliest tokens; 0 or -1 for all", "the model's, else off"
        ),
    )
    min_p: float = field(
        default=0.0,
        validator=NumberCheck(0, 1, "a number between 0 and 1"),
        metadata=_make_flag_metadata(
            "leave out tokens below this share of the likeliest one's probability",
            "the model's, else off",
        ),
    )
    presence_penalty: float = field(
        default=0.0,
        validator=PENALTY,
        metadata=_make_flag_metadata(
            "subtract this from the logit of each token that the answer has", "off"
        ),
    )
    frequency_penalty: float = field(
        default=0.0,
        validator=PENALTY,
        metadata=_make_flag_metadata(
            "subtract this once for each time that the answer has the token", "off"
        ),
    )
    repetition_penalty: float = field(
        default=1.0,
        validator=NumberCheck(MIN_REPETITION, MAX_REPETITION, "a number between 0.01 and 100.0"),
        metadata=_make_flag_metadata(
            "divide the logits of tokens in prompt or answer by this; multiply negative ones",
            "the model's, else 1.0",
        ),
    )
    seed: int | None = field(
        default=None,
        validator=IntegerCheck(MIN_SEED, MAX_SEED, "a 64-bit integer", optional=True),
        metadata=_make_flag_metadata(
            "seed of each prompt's sampling; the same seed gives the same text", "unset"
        ),
    )
    stop: tuple[str, ...] = field(
        default=(),
        converter=to_strings,
        validator=check_stop_strings,
        metadata=_make_flag_metadata("end a text before this string", "none"),
    )
    stop_token_ids: tuple[int, ...] = field(
        default=(),
        converter=to_ids,
        validator=TokenIdsCheck(MAX_STOP_TOKEN_IDS, empty=True),
        metadata=_make_flag_metadata("end a text before one of these tokens", "none"),
    )
    ignore_eos: bool = field(
        default=False,
        validator=check_bool,
        metadata=_make_flag_metadata(
            "continue past the model's end-of-sequence tokens, up to max_tokens"
        ),
    )
    max_tokens: int | None = field(
        default=DEFAULT_MAX_TOKENS,
        validator=POSITIVE_OR_NONE,
        metadata=_make_flag_metadata(
            "maximum number of tokens to generate for a prompt",
            "the model's, else 100; in chats all that the context holds",
            aliases=("--max-new-tokens",),
        ),
    )
    min_tokens: int = field(
        default=0,
        validator=IntegerCheck(0, MAX_COUNT, f"an integer from 0 to {MAX_COUNT}"),
        metadata=_make_flag_metadata("minimum number of tokens before an answer may end"),
    )
    logprobs: int | None = field(
        default=None,
        validator=LOGPROBS,
        metadata=_make_flag_metadata(
            "report each token's log-probability and this many likeliest alternatives", "none"
        ),
    )
    prompt_logprobs: int | None = field(
        default=None,
        validator=LOGPROBS,
        metadata=_make_flag_metadata("the same for the prompt's tokens", "none"),
    )
    skip_special_tokens: bool = field(
        default=True,
        validator=check_bool,
        metadata=_make_flag_metadata("leave special tokens out of the text"),
    )
    include_stop_str_in_output: bool = field(
        default=False,
        validator=check_bool,
        metadata=_make_flag_metadata("keep the stop string at the end of the text"),
    )
    logit_bias: dict[int, float] | None = field(
        default=None,
        converter=to_bias,
        validator=check_logit_bias,
        hash=False,
        metadata=_make_flag_metadata(
            "add a number to a token's logit, such as 42=-100 to forbid it", "none"
        ),
    )
    allowed_token_ids: tuple[int, ...] | None = field(
        default=None,
        converter=to_optional_ids,
        validator=TokenIdsCheck(MAX_ALLOWED_TOKEN_IDS, empty=False),
        metadata=_make_flag_metadata("sample only from these tokens", "all"),
    )
    user: str | None = field(
        default=None,
        validator=TextCheck(MAX_USER),
        metadata=_make_flag_metadata("user id passed to the scheduler", "none"),
    )
    extra_args: dict[str, Any] | None = field(
        default=None,
        converter=to_arguments,
        validator=check_extra_args,
        hash=False,
        metadata=_make_flag_metadata(
            "arguments for plugins that take some, as a JSON object", "none"
        ),
    )

    structured_outputs: StructuredOutputsParams | None = field(
        default=None,
        converter=to_structured_outputs,
        metadata=_make_flag_metadata(
            'structure of the answer, as JSON: {"json": SCHEMA}, {"regex": TEXT}, '
            '{"choice": [TEXT, ...]}, {"grammar": TEXT} or {"json_object": true}',
            "any",
        ),
    )

    __signature__: ClassVar[inspect.Signature]

    def __new__(cls, *positional: object, **values: object) -> SamplingParams:
        """An empty value for `__init__`, which would answer an unknown name with a TypeError."""
        if positional:
            raise RequestError(
                "SamplingParams takes keywords, such as max_tokens=20; got "
                f"{describe_type(positional[0])}"
            )
        _check_parameter_names(values)
        return super().__new__(cls)

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise make_parameter_error(
                "min_tokens", f"max_tokens ({self.max_tokens}) or less", self.min_tokens
            )

    def __copy__(self) -> SamplingParams:
        # What `copy` does without this method takes ten times as long.
        answer: SamplingParams = object.__new__(type(self))
        answer.__setstate__(self.__getstate__())  # type: ignore[attr-defined]  # attrs makes it
        return answer

    def copy_checked(self) -> SamplingParams:
        """A copy that later changes of these parameters do not reach.

        raises: RequestError when they are invalid by now
        """
        if (self.logit_bias, self.extra_args, self.structured_outputs) != (None, None, None):
            return evolve(self)  # what these hold may have been changed in place
        answer = copy(self)
        # Each field was checked as it was set, without a look at the others.
        answer.__attrs_post_init__()
        return answer

    def for_answer(self, index: int, seed: int) -> SamplingParams:
        """The parameters of answer `index`, seeded with `seed` + index modulo 2**64, as int64."""
        whole_seed = (seed + index - MIN_SEED) % (1 << 64) + MIN_SEED
        if self.n == 1 and self.seed == whole_seed and index == 0:
            return self
        # Not `evolve`: what is the same was checked, and may be a list of 200,000 ids.
        answer = copy(self)
        answer.n, answer.seed = 1, whole_seed
        answer.prompt_logprobs = self.prompt_logprobs if index == 0 else None
        return answer

    def replace(self, values: Mapping[str, object]) -> SamplingParams:
        """These parameters with `values` instead of some.

        raises: RequestError; for an unknown name with a suggestion
        """
        _check_parameter_names(values)
        return evolve(self, **values)  # type: ignore[arg-type]  # the fields' checks take any value


_, *_parameters = inspect.signature(SamplingParams.__init__).parameters.values()
# Otherwise help() and editors would show the arguments of `__new__`, which takes every name.
SamplingParams.__signature__ = inspect.Signature(_parameters)


_FIELDS = fields_dict(SamplingParams)


def _check_parameter_names(names: Iterable[object]) -> None:
    """Raise RequestError for a name that no sampling parameter has, with a suggestion."""
    for name in names:
        if name in _FIELDS:
            continue
        if name in FOREIGN:
            raise NotSupported(
                f"the sampling parameter {name} is not supported; {FOREIGN[str(name)]}", str(name)
            )
        aliases = {
            alias.lstrip("-").replace("-", "_"): parameter
            for parameter in _FIELDS.values()
            for alias in parameter.metadata["aliases"]
        }
        by_name = _FIELDS | aliases
        near = find_nearest_name(str(name), by_name)
        hint = f"did you mean {by_name[near].name}?" if near else f"known are {', '.join(_FIELDS)}"
        raise RequestError(
            f"no sampling parameter is called {shorten(name)!r}; {hint}", parameter=shorten(name)
        )
