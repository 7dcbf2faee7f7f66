"""The cases of a model family: small checkpoints of its architecture, compared with
transformers."""

from __future__ import annotations

import math
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
from attrs import frozen
from torch import Tensor

from headstock import registry
from headstock.errors import CannotRun, describe_error, shorten
from headstock.ops.torch_ops import TorchOps
from headstock.spi import DeviceEnv, Model, ModelSpec, StateKV
from headstock.startup.model_loading import untie_embeddings
from headstock.weights import load_weights, read_config
from headstock_conformance.case import Case
from headstock_conformance.model.alone import Lone, list_lone_cases, make_lone
from headstock_conformance.model.config_fields import check_eos, check_sizes
from headstock_conformance.model.paged import Paged
from headstock_conformance.model.parity import (
    expected,
    round_norms,
    silence_transformers,
    tokens,
    write,
)

LENGTH = 40
"""Tokens of the prompt: longer than the tested windows."""
TOLERANCE = 1e-4
"""Tolerance of a log-probability, in float32."""

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "num_experts": 6,
        "num_local_experts": 6,
        "moe_num_experts": 6,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_k": 2,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
)
"""Sizes by their names in config.json; a family gets those that its transformers class has."""

STATES: Mapping[str, str] = MappingProxyType(
    {"conv_L_cache": "conv", "linear_conv_kernel_dim": "linear_attention"}
)
"""What layers that keep a state are called, by a field of the classes that have some."""

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


SMALL_TOWER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 16,
        "embed_dim": 16,
        "intermediate_size": 16,
        "out_hidden_size": SMALL["hidden_size"],
        "num_hidden_layers": 1,
        "depth": 1,
        "num_attention_heads": 2,
        "num_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "num_position_embeddings": 16,
        "fullatt_block_indexes": [0],
        "deepstack_visual_indexes": [0],
    }
)
"""Sizes of a part for images; it gets those that its transformers class has."""


@frozen(kw_only=True)
class Subject:
    """A model family, and the fields of its transformers class with their defaults.

    fields: those of the decoder
    whole: those around it, in a model that takes more than text; None in one of text
    has_sections: whether sections of a head have positions of their own
    """

    spec: ModelSpec
    family: Model
    model_type: str
    fields: Mapping[str, Any]
    whole: Mapping[str, Any] | None = None
    has_sections: bool = False

    def make_config(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of a small model, with those changes that its class has."""
        kind = {"model_type": self.model_type, "architectures": [self.spec.name]}
        decoder = self._make_decoder(changes)
        if self.whole is None:
            return {**kind, **decoder}
        values = {name: value for name, value in changes.items() if name in self.whole}
        text = {"model_type": self.fields["model_type"], **decoder}
        tower = self.whole["vision_config"]
        if tower is None:  # some classes make no tower by default
            return {**kind, **values, "text_config": text}
        small = {name: value for name, value in SMALL_TOWER.items() if name in tower}
        vision = {"model_type": tower["model_type"], **small}
        return {**kind, **values, "text_config": text, "vision_config": vision}

    def _make_decoder(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The decoder's fields of a small model."""
        small = {name: value for name, value in SMALL.items() if name in self.fields}
        if self.fields.get("layer_types", ()) is None:
            # Some classes have no default of their own.
            small["layer_types"] = ["full_attention"] * small["num_hidden_layers"]
        for name, kind in STATES.items():
            if name in self.fields:
                # Those of the class are of a larger model, or all of one kind.
                small["layer_types"] = [kind, "full_attention", kind]
        if "linear_conv_kernel_dim" in self.fields:
            # A norm of what memories give makes small numbers large, and the rounding of chunks.
            small["rms_norm_eps"] = 0.3
        if "kv_lora_rank" in self.fields:
            # one latent vector serves all heads
            small.pop("head_dim", None)
            small["num_key_value_heads"] = small["num_attention_heads"]
        values = {name: value for name, value in changes.items() if name in self.fields}
        if self.has_sections:
            # Those of the class do not fit the small heads.
            table = values.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
            dim = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
            values["rope_parameters"] = {**table, "mrope_section": [dim // 4, dim // 8, dim // 8]}
        return {**small, **values}


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
    if cut := find_alignment(subject.family, hf):
        yield "a copied state", partial(check_copy, subject, cut)
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


def make_checkpoint(subject: Subject, changes: Mapping[str, Any], directory: Path) -> None:
    """A small checkpoint.   raises: CannotRun when transformers cannot make one"""
    try:
        write(directory, subject.make_config(changes))
    except Exception as error:
        raise CannotRun(
            f"transformers {transformers.__version__} cannot make it: {describe_error(error)}"
        ) from error


def load(subject: Subject, directory: Path, page_size: int, length: int = LENGTH) -> Paged:
    """The model over pages for two sequences, in float32."""
    config = subject.family.config(read_config(directory))
    config = untie_embeddings(directory, subject.family, config)
    params = load_weights(
        directory,
        subject.family.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=length,
    )
    return Paged.new(
        subject.family,
        config,
        params,
        TorchOps(),
        page_size=page_size,
        sequences=2,
        length=length,
    )


def compare(actual: Tensor, expected_scores: Tensor, text: str) -> None:
    """Raise AssertionError unless the log-probabilities are those of transformers."""
    assert actual.shape == expected_scores.shape, (
        f"scores: expected {tuple(expected_scores.shape)}, got {tuple(actual.shape)}"
    )
    off = (actual.log_softmax(-1) - expected_scores).abs().amax(-1)
    wrong = ~(off <= TOLERANCE)
    assert not bool(wrong.any()), (
        f"{text}log-probabilities are off by up to {float(off.max()):.2g} from those of "
        f"transformers, first at token {int(wrong.nonzero()[0])}"
    )


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


def find_alignment(family: Model, hf: Mapping[str, Any]) -> int:
    """Where the states of a family may be copied: at multiples of this; 0 where none may."""
    try:
        groups = family.config(hf).kv_groups
    except Exception:  # the cases say what is wrong with it
        return 0
    found = [group.layout.alignment for group in groups if isinstance(group.layout, StateKV)]
    return math.lcm(*(each or 0 for each in found)) if found else 0


def check_copy(subject: Subject, alignment: int) -> None:
    """A sequence goes on from a copy of another one's state, which went on otherwise."""
    cut = -(-9 // alignment) * alignment
    common, length = tokens(cut, seed=4), cut + 20
    prompts = [common + tokens(20, seed=seed) for seed in (5, 6)]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, {"max_position_embeddings": 4 * length}, Path(folder))
        paged = load(subject, Path(folder), 4, length)
        first = paged.step({0: common})
        paged.fork(0, 1)
        for number, prompt in enumerate(prompts):
            rest = paged.step({number: prompt[cut:]})
            compare(
                torch.cat((first, rest)),
                expected(Path(folder), prompt),
                f"behind {cut} tokens, sequence {number + 1} of 2: ",
            )
