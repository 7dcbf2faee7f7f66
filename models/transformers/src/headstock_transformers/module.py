"""Build transformers' module of a config.json without memory for its weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headstock_transformers.attention import PROBED

_WEIGHTS = (torch.empty, torch.rand, torch.randn)
"""What modules make weights by; what they make otherwise, such as tables of rope, is computed."""


_CHANGING_ROPES = ("dynamic", "longrope")
"""Kinds of rope that turn by the longest position of a call, not by a token's own."""

_COUNTS_POSITIONS = "create_position_ids_from_input_ids"
"""The method by which transformers' embeddings number tokens that are given without positions."""


@frozen(eq=False, kw_only=True)
class Decoder:
    """A causal decoder of transformers, whose weights are on the meta device.

    text: the part of its configuration that describes the decoder
    head: the same module over hidden states, which it gets as `inputs_embeds`
    computed: by name, what is in no checkpoint
    tied: names -> the name of the parameter that they share
    first_position: the number that the module gives to the first token of a text
    """

    model: PreTrainedModel
    text: PreTrainedConfig
    head: nn.Module
    computed: Mapping[str, Tensor]
    tied: Mapping[str, str]
    first_position: int = 0

    @property
    def base(self) -> nn.Module:
        """The part that makes hidden states."""
        found: nn.Module = self.model.get_submodule(self.model.base_model_prefix)
        return found

    def run_base(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Hidden states [tokens, hidden] by the attention function that is set.

        positions: counted from 0; None for those that the module gives to the tokens of a text
        """
        if positions is not None:
            positions = (positions + self.first_position if self.first_position else positions)[
                None
            ]
        output = self.base(input_ids=tokens[None], position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def run_head(self, hidden: Tensor) -> Tensor:
        """Scores [tokens, vocab] of hidden states, in the type of the weights."""
        scores: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits
        return scores[0]


class _WeightsOnMeta(TorchFunctionMode):
    """Make weights on the meta device, and compute all else."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _WEIGHTS:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class _Output(dict[str, Any]):
    """Hidden states as a base model returns them; it has nothing else."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int | slice) else self.get(key)


class GivenStates(nn.Module):
    """A base model that returns what it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def build_decoder(hf: Mapping[str, Any]) -> Decoder:
    """Build the decoder of a config.json.

    raises: ValueError with a reason, which names config.json first where that is at fault
    """
    model_type = hf.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError("config.json has no model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        raise ValueError(f"it has no model_type {model_type[:64]}")
    try:
        config = AutoConfig.for_model(**hf)
    except Exception as error:
        # What begins with the file's name blames the file.
        raise ValueError(
            f"config.json: transformers refuses the fields of model_type {model_type}: "
            f"{in_one_line(error).partition(': ')[2]}"
        ) from error
    kind: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ValueError(f"it has no causal decoder of model_type {model_type}")
    text = config.get_text_config()
    if text is not config:
        raise ValueError(f"{kind.__name__} takes more than text")
    if not kind.is_backend_compatible():
        raise ValueError(f"{kind.__name__} does not call transformers' attention interface")
    if getattr(kind, "_is_stateful", False) and not _is_all_attention(text):
        raise ValueError(f"{kind.__name__} has layers that keep a state")
    _check_fields(text, kind.__name__)
    try:
        with _WeightsOnMeta():
            model = kind._from_config(config, attn_implementation=PROBED, dtype=torch.float32)
    except Exception as error:
        raise ValueError(
            f"{kind.__name__} cannot be built: transformers fails with {in_one_line(error)}"
        ) from error
    _check_ropes(model, text)
    first_position = _find_first_position(model)
    _drop_padding(config)
    model.eval().requires_grad_(False)
    if not isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        raise ValueError(f"{kind.__name__} has no base model apart from its head")
    stored = model.state_dict().keys()
    computed = {name: each for name, each in model.named_buffers() if name not in stored}
    unknown = sorted(name for name, each in computed.items() if each.is_meta)
    if unknown:
        raise ValueError(f"{kind.__name__} has a buffer without numbers, {unknown[0]}")
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    computed = {name: each.clone() for name, each in computed.items()}
    model.to("meta")
    return Decoder(
        model=model,
        text=text,
        head=replace_base(model),
        computed=computed,
        tied=tied,
        first_position=first_position,
    )


def _check_fields(text: PreTrainedConfig, name: str) -> None:
    """Refuse what the configuration shows.   raises: ValueError"""
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        raise ValueError(f"{name} has no max_position_embeddings")
    if getattr(text, "attention_chunk_size", None):
        raise ValueError(f"{name} attends in chunks (attention_chunk_size)")


def _is_all_attention(text: PreTrainedConfig) -> bool:
    """Whether a kind of model that may keep states has layers of attention alone."""
    kinds = getattr(text, "layer_types", None) or ()
    return bool(kinds) and all("attention" in kind and "linear" not in kind for kind in kinds)


def _check_ropes(model: PreTrainedModel, text: PreTrainedConfig) -> None:
    """Refuse a rope that turns tokens by the length of their call.   raises: ValueError"""
    # What a module calls its rope holds: HunYuan's with `alpha` does not change, and is "dynamic"
    # in config.json alone.
    found = [getattr(each, "rope_type", None) for each in model.modules()]
    held = [each for each in found if isinstance(each, str | Mapping)]
    kinds = {
        kind
        for each in held or [{"rope": text.to_dict()}]
        for kind in (_list_rope_kinds(each) if isinstance(each, Mapping) else (each,))
    }
    changing = sorted(kinds.intersection(_CHANGING_ROPES))
    if changing:
        raise ValueError(
            f"{type(model).__name__} has rope_type {changing[0]!r}, which turns tokens by the "
            "length of a call"
        )


def _find_first_position(model: PreTrainedModel) -> int:
    """The number that the embeddings give to the first token of a text.   raises: ValueError

    RoBERTa and its kin count from behind their padding. The tokens that are tried are no padding.
    """
    found = {0}
    for module in model.modules():
        count: Any = getattr(module, _COUNTS_POSITIONS, None)
        if count is None:
            continue
        padding = getattr(module, "padding_idx", None)
        name = type(model).__name__
        try:
            tokens = torch.arange(4)[None] + (0 if padding is None else int(padding) + 1)
            positions = count(tokens, padding)[0]
        except Exception as error:
            raise ValueError(f"{name} counts positions in its own way: {in_one_line(error)}") from (
                error
            )
        found = {int(positions[0])}
        if (positions - positions[0]).tolist() != list(range(4)):
            raise ValueError(f"{name} has positions that do not count its tokens")
    return found.pop()


def _drop_padding(config: PreTrainedConfig) -> None:
    """Remove the token of padding, where the configuration may lack one.

    With one, some modules compare it with the tokens of each step, which waits for the device.
    """
    # A configuration that checks its fields may want a number, and keeps the one that it has.
    with suppress(Exception):
        config.pad_token_id = None


def _list_rope_kinds(fields: Mapping[str, Any]) -> Iterator[str]:
    """Every rope_type in the fields, at any depth."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _list_rope_kinds(value)
        elif name in ("rope_type", "type") and isinstance(value, str):
            yield value


def replace_base(model: PreTrainedModel) -> nn.Module:
    """The same module, with all but its base model shared."""
    head: nn.Module = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = GivenStates()
    return head


def in_one_line(error: BaseException) -> str:
    """What an error says, cut to what an error of ours can hold."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {text[:160]}"
