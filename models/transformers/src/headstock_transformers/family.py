"""A family that transformers computes; attention, pages and weights are headstock's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from transformers import PreTrainedConfig

from headstock.spi import (
    Attend,
    Batch,
    Feature,
    FullKV,
    KVGroup,
    LayerConfig,
    Model,
    ModelConfig,
    Ops,
    Params,
    ParamSpec,
)
from headstock_transformers.attention import LOCAL, PAGED, STEP, AttentionCall, Step
from headstock_transformers.exchange import exchange_modules
from headstock_transformers.exchanged import OpsLinear, OpsNorm
from headstock_transformers.module import Decoder, build_decoder
from headstock_transformers.operations import PLAIN, FineOperations, computing_with, find_operations
from headstock_transformers.options import TransformersOptions
from headstock_transformers.probe import probe_decoder
from headstock_transformers.replays import find_obstacle
from headstock_transformers.sources import find_sources

_DTYPES = ("float32", "bfloat16", "float16")
_CHECKED_TOKENS = 6
_ROUNDING = 1e-3
"""How far float32 results of one token may differ when its neighbours do, relative to them."""
_COARSE_ROUNDING = 0.1


def make_family(options: TransformersOptions) -> Model:
    """The family, for one engine."""
    family = _Family(options)
    return Model(
        config=family.config,
        params=family.params,
        forward=family.forward,
        logits=family.logits,
        check=family.check,
    )


@define(eq=False)
class _Family:
    """The functions of a `Model` over one decoder, which `config` builds.

    sources: what checkpoints have, by the decoder's names
    sinks: the parameters that hold sinks, by layer
    bound: the parameters that the decoder's modules hold
    operations: the fine ones of `ops`, the set that the engine gives
    """

    options: TransformersOptions
    decoder: Decoder = field(init=False)
    sources: Mapping[str, ParamSpec] = field(factory=dict)
    sinks: Mapping[int, str] = field(factory=dict)
    bound: Params | None = None
    ops: Ops | None = None
    operations: FineOperations = PLAIN

    def config(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Read config.json.   raises: ValueError with a reason"""
        decoder = self.decoder = build_decoder(hf)
        model, text = decoder.model, decoder.text
        _check_architecture(hf, decoder)
        layers = probe_decoder(decoder)
        self.sources = _keep_wide(model, find_sources(model))
        if self.options.experts != "auto":
            model.set_experts_implementation(self.options.experts)
        call = layers[0][0]
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.sinks = {
            each.layer: _find_sinks(each, names) for each, _ in layers if each.sinks is not None
        }
        windows = list(dict.fromkeys(window for _, window in layers))
        layout = FullKV(kv_heads=call.keys[1], k_dim=call.keys[-1], v_dim=call.keys[-1])
        found = ModelConfig(
            architecture=type(model).__name__,
            vocab=int(text.vocab_size),
            hidden=int(text.hidden_size),
            heads=call.queries[1],
            kv_heads=call.keys[1],
            head_dim=call.keys[-1],
            intermediate=_read_width(text),
            norm_eps=1e-6,
            max_position=int(text.max_position_embeddings) - decoder.first_position,
            ropes=(),
            layers=tuple(
                _make_layer(each, window, windows, self.sinks.get(each.layer))
                for each, window in layers
            ),
            kv_groups=tuple(
                KVGroup(
                    layers=tuple(each.layer for each, other in layers if other == window),
                    layout=layout,
                    window=window,
                )
                for window in windows
            ),
            tied_embeddings=bool(decoder.tied),
            dtype=_read_dtype(hf),
            eos_ids=_read_eos(hf),
            features=frozenset(_list_features(layers)),
        )
        if self.options.exchange:
            self.decoder, self.sources = exchange_modules(decoder, self.sources, found)
        obstacle = find_obstacle(self.decoder, found)
        return evolve(found, is_capturable=not obstacle, capture_obstacle=obstacle)

    def params(self, config: ModelConfig) -> dict[str, ParamSpec]:
        """Declare the parameters by the names that the modules have for them."""
        decoder = self.decoder
        tied = decoder.tied if config.tied_embeddings else {}
        found = self.sources
        sinks = set(self.sinks.values())
        specs = {}
        for name, spec in found.items():
            if name in tied:
                continue
            copies = [found[each].sources[0][0] for each, source in tied.items() if source == name]
            specs[name] = evolve(
                spec,
                copies=(*spec.copies, *copies),
                dtype="float32" if name in sinks else spec.dtype,
            )
        first = next(iter(specs))
        specs[first] = evolve(
            specs[first],
            ignored=tuple(_list_ignored(decoder)),
            left_out=tuple(_list_left_out(decoder.model)),
        )
        return specs | {name: _declare(tensor) for name, tensor in decoder.computed.items()}

    def forward(
        self, params: Params, config: ModelConfig, batch: Batch, attend: Attend, ops: Ops
    ) -> Tensor:
        """Hidden states [tokens, hidden]."""
        self._bind(params)
        operations = self._find_operations(ops)
        token = STEP.set(Step(batch, config, attend, operations))
        try:
            with computing_with(operations):
                return self.decoder.run_base(batch.tokens, batch.positions)
        finally:
            STEP.reset(token)

    def logits(self, params: Params, config: ModelConfig, hidden: Tensor, ops: Ops) -> Tensor:
        """Scores by the head of transformers' module, with its scales and caps."""
        self._bind(params)
        with computing_with(self._find_operations(ops)):
            return self.decoder.run_head(hidden).float()

    def check(self, params: Params, config: ModelConfig) -> None:
        """Check that tokens meet in attention alone, and turn by their own positions.

        raises: ValueError
        """
        self._bind(params)
        model = self.decoder.model
        model.set_attn_implementation(LOCAL)
        try:
            with torch.inference_mode(), computing_with(PLAIN):
                device = next(model.parameters()).device
                distance, shift = self._measure_neighbours(device), self._measure_positions(device)
        finally:
            model.set_attn_implementation(PAGED)
        wide = next(model.parameters()).dtype is torch.float32
        rounding = _ROUNDING if wide else _COARSE_ROUNDING
        if not shift <= rounding:
            raise ValueError(
                f"{type(model).__name__} numbers the tokens of a text otherwise than by 0, 1, 2, "
                "so its answers would be wrong; choose another model"
            )
        if not distance <= rounding:
            raise ValueError(
                f"in {type(model).__name__} a token's result changes with the tokens of its call "
                "outside attention, so pages and chunks would change answers; choose another model"
            )

    def _measure_neighbours(self, device: torch.device) -> float:
        """How far results move with the tokens of their call, relative to them.

        Attention is replaced by what depends on a token alone.
        """
        tokens, vocab = self._make_tokens(device), int(self.decoder.text.vocab_size)
        positions = torch.arange(_CHECKED_TOKENS, device=device) + 3
        half = _CHECKED_TOKENS // 2
        mixed = torch.cat(((tokens[:half] + 1) % vocab, tokens[half:]))
        run = self.decoder.run_base
        wanted = run(tokens, positions)[half:].float()
        alone = run(tokens[half:], positions[half:]).float()
        beside = run(mixed, positions)[half:].float()
        size = wanted.norm().clamp_min(1e-12)
        return max(float((each - wanted).norm() / size) for each in (alone, beside))

    def _measure_positions(self, device: torch.device) -> float:
        """How far results move where the module numbers the tokens itself, relative to them."""
        tokens = self._make_tokens(device)
        given = self.decoder.run_base(tokens, torch.arange(_CHECKED_TOKENS, device=device)).float()
        made = self.decoder.run_base(tokens, None).float()
        return float((made - given).norm() / given.norm().clamp_min(1e-12))

    def _make_tokens(self, device: torch.device) -> Tensor:
        """A few tokens of the vocabulary, spread over it, none of them padding.

        returns: [tokens]
        """
        vocab, model = int(self.decoder.text.vocab_size), self.decoder.model
        padding = {each.padding_idx for each in model.modules() if isinstance(each, nn.Embedding)}
        spread = (number * 7919 % vocab for number in range(_CHECKED_TOKENS + len(padding)))
        tokens = [each for each in spread if each not in padding][:_CHECKED_TOKENS]
        return torch.tensor(tokens, device=device)

    def _find_operations(self, ops: Ops) -> FineOperations:
        """The fine operations of the set, looked for once.   writes: self"""
        if self.ops is not ops:
            self.ops, self.operations = ops, find_operations(ops)
        return self.operations

    def _bind(self, params: Params) -> None:
        """Give the modules these parameters, unless they have them."""
        if self.bound is params:
            return
        decoder, model = self.decoder, self.decoder.model
        tensors = {}
        for name, weight in params.items():
            tensors[name] = weight.tensor
            if weight.bias is not None:
                tensors[f"{name}.bias"] = weight.bias
        for name, source in decoder.tied.items():
            tensors.setdefault(name, tensors[source])
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            is_buffer = leaf in dict(module.named_buffers(recurse=False))
            value = tensor if is_buffer else nn.Parameter(tensor, requires_grad=False)
            setattr(module, leaf, value)
        for module in model.modules():
            if isinstance(module, OpsLinear | OpsNorm):
                module.hold()
        model.set_attn_implementation(PAGED)
        self.bound = params


def _keep_wide(model: nn.Module, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """The parameters, with the type of those that transformers keeps in float32."""
    words = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return {
        name: evolve(spec, dtype="float32")
        if any(f".{word}." in f".{name}." for word in words)
        else spec
        for name, spec in specs.items()
    }


def _check_architecture(hf: Mapping[str, Any], decoder: Decoder) -> None:
    """Refuse another model of the same model_type, such as a classifier.   raises: ValueError"""
    found = hf.get("architectures") or [None]
    served = (type(decoder.model).__name__, type(decoder.base).__name__)
    # Phi-3.5-MoE was published as PhiMoEForCausalLM, and is PhimoeForCausalLM here.
    if str(found[0]).lower() not in map(str.lower, served):
        raise ValueError(f"model_type {hf['model_type']} is computed as {served[0]} alone")


def _find_sinks(call: AttentionCall, names: Mapping[int, str]) -> str:
    """The parameter that holds the layer's sinks.   raises: ValueError"""
    name = names.get(id(call.sinks))
    if name is None:
        raise ValueError(f"layer {call.layer} computes its sinks, which no backend is told")
    return name


def _make_layer(
    call: AttentionCall, window: int | None, windows: list[int | None], sinks: str | None
) -> LayerConfig:
    """One layer as backends see it."""
    assert call.scale is not None
    return LayerConfig(
        index=call.layer,
        prefix=f"layers.{call.layer}.",
        group=windows.index(window),
        scale=call.scale,
        window=window,
        softcap=call.softcap,
        rope=None,
        sinks=sinks,
    )


def _list_features(layers: tuple[tuple[AttentionCall, int | None], ...]) -> Iterator[Feature]:
    """What some layer asks of a backend."""
    if any(window is not None for _, window in layers):
        yield Feature.SLIDING_WINDOW
    if any(call.softcap for call, _ in layers):
        yield Feature.SOFTCAP
    if any(call.sinks is not None for call, _ in layers):
        yield Feature.SINKS


def _declare(tensor: Tensor) -> ParamSpec:
    """A parameter that no checkpoint has."""
    return ParamSpec(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        compute=lambda config, length: tensor,
    )


def _list_ignored(decoder: Decoder) -> Iterator[str]:
    """Names of tables of rope that older checkpoints have."""
    base = decoder.model.base_model_prefix
    yield from decoder.computed
    for layer in range(int(decoder.text.num_hidden_layers)):
        yield f"{base}.layers.{layer}.self_attn.rotary_emb.inv_freq"


def _list_left_out(model: nn.Module) -> Iterator[str]:
    """Beginnings of names that transformers leaves unread, where they are plain ones."""
    for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ():
        plain = re.sub(r"\\\.", ".", pattern).removeprefix("^").removesuffix("*").removesuffix(".")
        if re.fullmatch(r"[\w.]+", plain):
            yield plain


def _read_width(text: PreTrainedConfig) -> int:
    """The width of the feed-forward part; four times the stream's where nothing says it."""
    width = text.to_dict().get("intermediate_size")
    return width if isinstance(width, int) and width > 0 else 4 * int(text.hidden_size)


def _read_dtype(hf: Mapping[str, Any]) -> str:
    """The type of the checkpoint, by torch's name."""
    found = hf.get("dtype") or hf.get("torch_dtype")
    return found if found in _DTYPES else "float32"


def _read_eos(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer.   raises: ValueError"""
    value = hf.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not all(each is None or isinstance(each, int) for each in ids):
        raise ValueError(f"eos_token_id: expected a token id or a list, got {str(value)[:64]}")
    return tuple(each for each in ids if each is not None)
