"""The operations of one model: each is a set's own or composed, as decided once for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from attrs import frozen
from torch import Tensor

from headstock.errors import CannotRun, PluginBroken, describe_type
from headstock.nn.vocab_shard import gather_mask, needs_whole_rows
from headstock.ops.fine_tier import FineTierOps
from headstock.spi import (
    ALONE,
    LAYER_OPERATIONS,
    OPERATIONS,
    Batch,
    Collectives,
    LayerConfig,
    ModelConfig,
    Ops,
    Params,
    ParamSpec,
    Sample,
    Sampling,
    Stream,
    Weight,
    WeightFormat,
)

_Operation = Callable[..., Any]


@frozen(kw_only=True)
class OperationTable:
    """Which operations the ops plugin fuses: operation -> one answer for each layer that has it.

    An operation outside layers has one answer, of layer None.
    """

    fused: tuple[tuple[str, tuple[tuple[int | None, bool], ...]], ...]

    def lines(self) -> list[str]:
        """What is fused and what is composed, each with the layers if others differ."""
        names: dict[bool, list[str]] = {True: [], False: []}
        for operation, answers in self.fused:
            for value, where in names.items():
                layers = [layer for layer, is_fused in answers if is_fused is value]
                if layers:
                    some = len(layers) < len(answers)
                    where.append(f"{operation} ({_spell_layers(layers)})" if some else operation)
        if not names[True]:
            return ["all composed"]
        texts = (("fused", names[True]), ("composed", names[False]))
        return [f"{word}: {', '.join(where)}" for word, where in texts if where]

    def has_composed(self, operation: str) -> bool:
        """Whether a layer has the operation composed."""
        return any(
            not is_fused
            for name, answers in self.fused
            if name == operation
            for _, is_fused in answers
        )


class BoundOps(Ops):
    """The operations of one model; a set's own where it takes them, else composed.

    What a family's own forward pass calls beside `OPERATIONS` is the set's.
    """

    def __init__(self, name: str, ops: Ops, config: ModelConfig) -> None:
        """Bind the operations of the set `name`.

        raises: CannotRun for an operation that the set neither takes nor can compose,
            PluginBroken for a set that replaces operations and takes none
        """
        self._name, self._ops = name, ops
        _check_takes(name, ops)
        answers = {
            operation: {
                None if layer is None else layer.index: _is_fused(ops, operation, config, layer)
                for layer in _list_layers(operation, config)
            }
            for operation in OPERATIONS
        }
        self.table = OperationTable(
            fused=tuple(
                (each, tuple(by_layer.items())) for each, by_layer in answers.items() if by_layer
            )
        )
        functions = {
            operation: {
                layer: self._choose(name, operation, is_fused)
                for layer, is_fused in by_layer.items()
            }
            for operation, by_layer in answers.items()
        }
        self._outer = {
            each: by_layer[None] for each, by_layer in functions.items() if None in by_layer
        }
        # One dictionary an operation: a look-up by name as well would be felt in a small step.
        self._qkv_rope_store = functions["qkv_rope_store"]
        self._attn_out = functions["attn_out"]
        self._short_conv, self._delta_rule = functions["short_conv"], functions["delta_rule"]
        self._mlp, self._moe = functions["mlp"], functions["moe"]
        # Scores of a set's own `lm_head` are those of whole rows.
        self._is_sharded = config.shard.count > 1 and not answers["lm_head"][None]
        # Bind the function directly if all layers share it: one call less is measurable in a
        # one-token CPU step.
        vars(self).update(
            {
                operation: next(iter(by_layer.values()))
                for operation, by_layer in functions.items()
                if len(set(by_layer.values())) == 1
            }
        )

    def _choose(self, name: str, operation: str, is_fused: bool) -> _Operation:
        """The set's own operation or the composed one.   raises: CannotRun without either"""
        if is_fused:
            own: _Operation = getattr(self._ops, operation)
            return own
        if operation == "lm_head_sample":
            return self._compose_sample
        if not isinstance(self._ops, FineTierOps):
            raise CannotRun(
                f"ops (--ops) {name} does not take {operation} of this model, and has no fine "
                "operations to compose it of; set it to torch"
            )
        composed: _Operation = getattr(FineTierOps, operation).__get__(self._ops)
        return composed

    def _compose_sample(self, hidden: Tensor, sampling: Sampling) -> Sample:
        """Tokens sampled from the scores of `hidden`, of whole rows only where that is needed."""
        if self._is_sharded and not needs_whole_rows(sampling):
            shard: FineTierOps = self._ops  # type: ignore[assignment]
            return shard.sample_shard(FineTierOps.score_shard(shard, hidden), sampling)
        # Over this object, whose `lm_head` is the one that was chosen.
        return self.sample(self.lm_head(hidden), sampling)

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """Yes: what the set does not take is composed."""
        return True

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        """As the set says."""
        return bool(self._ops.takes_format(spec, format))

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """The weight as prepared by the set.   raises: PluginBroken unless it is a Weight"""
        prepared: object = self._ops.prepare(spec, weight)
        if not isinstance(prepared, Weight):
            raise PluginBroken(
                f"ops plugin {self._name!r}: prepare: expected a headstock.spi.Weight, got "
                f"{describe_type(prepared)}"
            )
        return prepared

    def count_kernel_bytes(self, params: Params, max_tokens: int) -> int:
        """As the set counts them."""
        return self._ops.count_kernel_bytes(params, max_tokens)

    def bind(self, params: Params, config: ModelConfig, collectives: Collectives = ALONE) -> None:
        """See `Ops.bind`."""
        super().bind(params, config, collectives)
        self._ops.bind(params, config, collectives)

    def embed(self, batch: Batch) -> Stream:
        """See `Ops.embed`."""
        x: Stream = self._outer["embed"](batch)
        return x

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """See `Ops.qkv_rope_store`."""
        q: Tensor = self._qkv_rope_store[layer.index](x, layer, batch)
        return q

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """See `Ops.attn_out`."""
        y: Stream = self._attn_out[layer.index](x, attention, layer, batch)
        return y

    def short_conv(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.short_conv`."""
        y: Stream = self._short_conv[layer.index](x, layer, batch)
        return y

    def delta_rule(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.delta_rule`."""
        y: Stream = self._delta_rule[layer.index](x, layer, batch)
        return y

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.mlp`."""
        y: Stream = self._mlp[layer.index](x, layer, batch)
        return y

    def moe(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.moe`."""
        y: Stream = self._moe[layer.index](x, layer, batch)
        return y

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """See `Ops.final_norm`."""
        hidden: Tensor = self._outer["final_norm"](x, batch)
        return hidden

    def lm_head(self, hidden: Tensor) -> Tensor:
        """See `Ops.lm_head`."""
        scores: Tensor = self._outer["lm_head"](hidden)
        return scores

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `Ops.sample`."""
        return self._ops.sample(logits, gather_mask(sampling, self.config, self.all_gather))

    def lm_head_sample(self, hidden: Tensor, sampling: Sampling) -> Sample:
        """See `Ops.lm_head_sample`."""
        sampled: Sample = self._outer["lm_head_sample"](hidden, sampling)
        return sampled

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Ops.all_reduce`."""
        return self._ops.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Ops.all_gather`."""
        return self._ops.all_gather(x)

    def __getattr__(self, name: str) -> Any:
        """What the set has beside `Ops`: its fine operations."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._ops, name)


def _check_takes(name: str, ops: Ops) -> None:
    """Raise PluginBroken where operations are replaced and `takes` says of none that it serves."""
    # Ignoring them would be silent, and so would be using them for what they may not serve.
    if isinstance(ops, FineTierOps) and type(ops).takes is FineTierOps.takes:
        replaced = [operation for operation in OPERATIONS if _has_own(ops, operation)]
        if replaced:
            raise PluginBroken(
                f"ops plugin {name!r} replaces {', '.join(replaced)}, but has no `takes` that says "
                "for which models; its author should add one"
            )


def _list_layers(operation: str, config: ModelConfig) -> Sequence[LayerConfig | None]:
    """The layers that have the operation; None alone for one outside layers."""
    if operation not in LAYER_OPERATIONS:
        return (None,)
    if operation == "short_conv":
        return [layer for layer in config.layers if layer.conv is not None]
    if operation == "delta_rule":
        return [layer for layer in config.layers if layer.delta is not None]
    if operation not in ("mlp", "moe"):
        return [layer for layer in config.layers if layer.state is None]
    return [layer for layer in config.layers if (operation == "moe") == (layer.experts is not None)]


def _is_fused(ops: Ops, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
    """Whether the set does the operation itself."""
    return _has_own(ops, operation) and bool(ops.takes(operation, config, layer))


def _has_own(ops: Ops, operation: str) -> bool:
    """Whether the set's class has the operation itself, and not from core."""
    function = getattr(type(ops), operation)
    return all(function is not getattr(base, operation) for base in (FineTierOps, Ops))


def _spell_layers(layers: Sequence[int | None]) -> str:
    """Layer numbers with runs as ranges: "layers 0, 2-5"."""
    numbers = [layer for layer in layers if layer is not None]
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layers {', '.join(spans)}"
