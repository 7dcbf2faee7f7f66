"""The cases of a model family: small checkpoints of its architecture, compared with
transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from headstock import registry
from headstock.errors import CannotRun, shorten
from headstock.spi import DeviceEnv, Model, ModelSpec
from headstock.weights import read_config
from headstock_conformance.case import Case
from headstock_conformance.model.alone import Lone, list_lone_cases, make_lone
from headstock_conformance.model.config_fields import check_eos, check_sizes
from headstock_conformance.model.parity import (
    expected,
    round_norms,
    silence_transformers,
    tokens,
)
from headstock_conformance.model.state_checks import list_state_cases
from headstock_conformance.model.subject import (
    LENGTH,
    SMALL,
    Subject,
    compare,
    load,
    make_checkpoint,
)

VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "a large eps of norms": {
            "rms_norm_eps": 0.3,
            "norm_eps": 0.3,
            "layer_norm_eps": 0.3,
        },
        "tied embeddings": {"tie_word_embeddings": True},
        "untied embeddings": {"tie_word_embeddings": False},
        "one KV head": {"num_key_value_heads": 1},
        "another rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        "a scaled rope": {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}
        },
        "a window": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
        "biases of attention": {"attention_bias": True, "use_bias": True, "qkv_bias": True},
        "biases of the feed-forward part": {"mlp_bias": True},
        "wide heads": {"head_dim": 64},
    }
)
"""Changes of config.json; a family gets those that its transformers class has."""


def list_cases(spec: ModelSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases of a family, on the CPU and in float32 on any machine.

    If transformers lacks its architecture, it is only compared with itself; a case says so.

    raises: PluginBroken
    """
    try:
        subject = find_subject(spec, opt)
    except CannotRun as error:
        lacking = str(error)

        def say_so() -> None:
            raise CannotRun(lacking)

        def make() -> Lone:
            return make_lone(registry.make_family(spec, opt), spec.name, SMALL)

        named = [("a small model, beside transformers", say_so), *list_lone_cases(make)]
        return tuple(Case(name, run) for name, run in named)
    return tuple(Case(name, run) for name, run in list_named(subject))


def import_first(name: str) -> None:
    """Import transformers' modules of the architecture, which takes seconds."""
    # A case reports the failure.
    with suppress(Exception):
        getattr(transformers, name, None)


def find_subject(spec: ModelSpec, opt: Sequence[str] = ()) -> Subject:
    """The family with its transformers class.   raises: CannotRun, PluginBroken"""
    kind: Any = getattr(transformers, spec.name, None)
    if kind is None or getattr(kind, "config_class", None) is None:
        raise CannotRun(
            f"transformers {transformers.__version__} has no {spec.name}: the family is compared "
            "with itself alone, in chunks and batches"
        )
    family: Model = registry.make_family(spec, opt)
    with silence_transformers():
        config = kind.config_class()
    fields, decoder = config.to_dict(), config.get_text_config()
    text = fields.get("text_config")
    return Subject(
        spec=spec,
        family=family,
        model_type=kind.config_class.model_type,
        fields=fields if text is None else text,
        whole=None if text is None else fields,
        has_sections="mrope_section" in getattr(decoder, "ignore_keys_at_rope_validation", ()),
    )


def list_named(subject: Subject) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases by name."""
    hf = subject.make_config({})
    yield "tokens that end a text", partial(check_eos, subject.family, hf)
    yield "positions and the vocabulary", partial(check_sizes, subject.family, hf)
    yield "where norms round", partial(check_norms, subject)
    yield "a small model", partial(check_whole, subject, {})
    yield "in chunks", partial(check_chunks, subject)
    yield "two sequences in a step", partial(check_two, subject)
    yield from list_state_cases(subject, hf)
    for name, changes in VARIANTS.items():
        heads = {"num_key_value_heads", "head_dim"} & changes.keys()
        if changes.keys() & subject.fields.keys() and not (
            heads and "kv_lora_rank" in subject.fields
        ):
            yield name, partial(check_variant, subject, changes)


def check_norms(subject: Subject) -> None:
    """Norms multiply by their weights before or after rounding, as transformers' do."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, {}, Path(folder))
        wide = round_norms(Path(folder))
        config = subject.family.config(read_config(Path(folder)))
    if wide is None:
        raise CannotRun("the norm of the transformers class does not round once")
    is_wide = config.wide_norms or config.norm_offset
    assert is_wide == wide, (
        f"ModelConfig.wide_norms is {config.wide_norms} and norm_offset {config.norm_offset}; "
        f"transformers' norms multiply by their weights {'before' if wide else 'after'} they round"
    )


def check_variant(subject: Subject, changes: Mapping[str, Any]) -> None:
    """A variant of the small model, unless the family refuses it with a reason.

    raises: CannotRun for a refusal
    """
    hf = subject.make_config(changes)
    try:
        subject.family.config(hf)
    except ValueError as error:
        raise CannotRun(f"the family refuses it: {shorten(error, 200)}") from error
    check_whole(subject, changes)


def check_whole(subject: Subject, changes: Mapping[str, Any]) -> None:
    """A prompt in one step."""
    prompt = tokens(LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, changes, Path(folder))
        scores = load(subject, Path(folder), 16).step({0: prompt})
        compare(scores, expected(Path(folder), prompt), "")


def check_chunks(subject: Subject) -> None:
    """A prompt in chunks, then token by token, over small pages."""
    prompt = tokens(LENGTH)
    bounds = [0, 9, 10, 23, 36, *range(37, LENGTH + 1)]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, {}, Path(folder))
        paged = load(subject, Path(folder), 4)
        parts = pairwise(bounds)
        scores = torch.cat([paged.step({0: prompt[start:stop]}) for start, stop in parts])
        compare(scores, expected(Path(folder), prompt), "in chunks: ")


def check_two(subject: Subject) -> None:
    """Two sequences of other lengths share steps."""
    prompts = tokens(30, seed=2), tokens(17, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, {}, Path(folder))
        paged = load(subject, Path(folder), 4)
        expected_scores = [expected(Path(folder), prompt) for prompt in prompts]
        first = paged.step({0: prompts[0][:20], 1: prompts[1][:6]})
        second = paged.step({1: prompts[1][6:], 0: prompts[0][20:]})
        actual = (
            torch.cat([first[:20], second[11:]]),
            torch.cat([first[20:], second[:11]]),
        )
        for number, (scores, right) in enumerate(zip(actual, expected_scores, strict=True)):
            compare(scores, right, f"sequence {number + 1} of 2: ")
