"""The sampling values that flags, environment and files may set; what is not set is left to the model."""

from __future__ import annotations

from attrs import frozen

from headstock.config.kinds import Integer, Number, Text, Texts
from headstock.config.setting import setting


@frozen(kw_only=True)
class SamplingSettings:
    """What was asked of sampling; None where nothing was.

    raises: UsageError naming the flag, the value and the rule
    """

    max_tokens: int | None = setting(
        "--max-tokens",
        Integer(least=1, word="auto"),
        None,
        "most tokens to generate for a prompt",
        default_text="the model's, else 100",
    )
    temperature: float | None = setting(
        "--temperature",
        Number(least=0.0, most=2.0, rule="must be between 0.0 and 2.0", word="auto"),
        None,
        "spread of the choice of tokens; 0 always takes the likeliest",
        default_text="the model's, else 1.0",
    )
    top_p: float | None = setting(
        "--top-p",
        Number(least=0.0, most=1.0, above=True, rule="must be above 0.0 and at most 1.0", word="auto"),
        None,
        "sample from the smallest set of tokens whose probabilities sum to this",
        default_text="the model's, else 1.0",
    )
    top_k: int | None = setting(
        "--top-k",
        Integer(least=-1, word="auto"),
        None,
        "sample from this many likeliest tokens; 0 or -1 for all",
        default_text="the model's, else off",
    )
    min_p: float | None = setting(
        "--min-p",
        Number(least=0.0, most=1.0, rule="must be between 0.0 and 1.0", word="auto"),
        None,
        "leave out tokens below this share of the likeliest one's probability",
        default_text="the model's, else off",
    )
    seed: int | None = setting(
        "--seed",
        Integer(least=0, most=2**63 - 1, word="auto"),
        None,
        "seed of each prompt's sampling; the same seed gives the same text",
        default_text="unset",
    )
    stop: tuple[str, ...] = setting(
        "--stop",
        Texts(each=Text(pattern=r"(?s).+", form="TEXT"), spaced=False),
        (),
        "end a text before this string",
        default_text="none",
    )
