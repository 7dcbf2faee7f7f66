"""The settings of an engine that say which plugins it is made of."""

from __future__ import annotations

from attrs import frozen

from headstock.config.model_settings import ModelSettings
from headstock.config.patterns import ATTN, NAME, OPTION
from headstock.config.setting import setting_field
from headstock.config.value_types import Number, Switch, Text, Texts


@frozen(kw_only=True)
class PartSettings(ModelSettings):
    """The plugins that serve the model."""

    attn: str = setting_field(
        "--attn",
        ATTN,
        "auto",
        "attention backend for both phases, or one for prefill and one for decode; + joins "
        "those for KV groups of other shapes",
        aliases=("--attention-backend",),
        default_text="auto: the first of the device's list that can run",
        group="parts",
    )
    cache_type: str = setting_field(
        "--cache-type", NAME, "radix", "policy for reusing the KV pages of prompts", group="parts"
    )
    scheduler: str = setting_field(
        "--scheduler", NAME, "mixed", "policy that picks what each step computes", group="parts"
    )
    runner: str = setting_field(
        "--runner",
        NAME,
        "auto",
        "how a step is launched",
        default_text="auto: cudagraph where the decode backend supports it, else eager",
        group="parts",
    )
    ops: str = setting_field(
        "--ops", NAME, "auto", "kernels of the decoder's operations", group="parts"
    )
    tuned_choices: str | None = setting_field(
        "--tuned-choices",
        Text(form="DIR", word="off"),
        "~/.cache/headstock/tuned",
        "directory of tuning results that auto prefers to its built-in order; off: the order",
        group="parts",
        shapes_steps=False,
    )
    proposer: str = setting_field(
        "--proposer", NAME, "off", "speculative decoding method", group="parts"
    )
    draft_model: str | None = setting_field(
        "--draft-model",
        Text(form="MODEL", word="off"),
        None,
        "small model whose next tokens the proposer 'draft' proposes",
        group="parts",
    )
    logits_processors: tuple[str, ...] = setting_field(
        "--logits-processors",
        Texts(item=NAME, spaced=True),
        (),
        "logits processors that requests may use",
        default_text="none",
        group="parts",
    )
    grammar: str = setting_field(
        "--grammar",
        NAME,
        "auto",
        "plugin that compiles the grammars of structured outputs",
        default_text="auto: llguidance if it is installed, else none; off: none",
        group="parts",
    )
    grammar_timeout: float = setting_field(
        "--grammar-timeout",
        Number(least=0.1, most=600, rule="a number between 0.1 and 600"),
        5.0,
        "seconds that a grammar may take to compile before the request is refused",
        group="parts",
    )
    open_objects: bool = setting_field(
        "--open-objects",
        Switch(),
        False,
        "let objects of structured outputs have members that their schema does not list, unless it "
        "says additionalProperties: false; off: only where it says that they may",
        group="parts",
        shapes_steps=False,
    )
    executor: str = setting_field(
        "--executor",
        NAME,
        "auto",
        "where steps are executed; inline: in the engine's process",
        default_text="auto: inline for one rank, multiprocess for several",
        group="parts",
    )
    opt: tuple[str, ...] = setting_field(
        "--opt",
        Texts(item=OPTION, spaced=True),
        (),
        "an option of one plugin, such as fa.num_splits=4",
        default_text="none",
        group="parts",
    )
