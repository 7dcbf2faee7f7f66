"""Wrap the parts of an executor in what debug flags check of them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve
from torch import Tensor

from headstock.debug.operation_reference import OperationReference
from headstock.debug.watch import DebugWatch
from headstock.debug.watched_attention import WatchedAttention
from headstock.debug.watched_logits import WatchedProcessor
from headstock.debug.watched_ops import WatchedOps
from headstock.errors import PluginBroken, describe_type
from headstock.spi import (
    Attend,
    AttentionBackend,
    AttentionContext,
    Batch,
    LogitsProcessor,
    Model,
    ModelConfig,
    Ops,
    Params,
)
from headstock.startup.build_inputs import BuildInputs

_PACKED_LOSS = 0.15
"""What products by packed weights may be off by, since they may round activations as well."""


def make_watch(inputs: BuildInputs, tokens: Tensor) -> DebugWatch | None:
    """Make the watch over an executor's steps; None without debug flags that need one.

    tokens: the token table
    """
    config, parts = inputs.config, inputs.parts
    if not (config.debug_invariants or config.debug_attention or config.debug_ops):
        return None
    return DebugWatch(parts.ops.name, parts.runner.name, inputs.model.full_vocab, tokens)


def watch_attention(
    inputs: BuildInputs,
    watch: DebugWatch | None,
    backend: AttentionBackend,
    name: str,
    context: AttentionContext,
) -> AttentionBackend:
    """Wrap a backend; it is returned as it is without debug flags for it."""
    config = inputs.config
    if watch is None or not (config.debug_invariants or config.debug_attention):
        return backend
    return WatchedAttention(
        backend, name, watch, context.kv, context.pools, compare=config.debug_attention
    )


def watch_operations(
    inputs: BuildInputs, watch: DebugWatch | None, page_tables: Sequence[Tensor]
) -> Ops:
    """Wrap the operations; they are returned as they are without debug flags for them."""
    config, name = inputs.config, inputs.parts.ops.name
    if watch is None or not (config.debug_invariants or config.debug_ops):
        return inputs.parts.operations
    plain, operations = inputs.plain_params, inputs.parts.operations
    who, loss = f"the ops plugin {name!r}", inputs.parts.ops.capabilities.weight_loss
    kinds = {format.kind for format in inputs.needs.formats}
    if kinds & inputs.parts.ops.capabilities.formats:
        loss = max(loss, _PACKED_LOSS)
    reference = None
    if plain is not None:
        reference = OperationReference(plain, inputs.model, who, loss, operations.collectives)
    return WatchedOps(operations, name, watch, reference, page_tables)


def watch_processors(inputs: BuildInputs, watch: DebugWatch | None) -> dict[str, LogitsProcessor]:
    """Wrap the logits processors, by name; without debug flags for them they are as they are."""
    selected = inputs.parts.processors
    if watch is None or not inputs.config.debug_invariants:
        return {each.spec.name: each.processor for each in selected}
    return {
        each.spec.name: WatchedProcessor(each.processor, each.spec.name, watch) for each in selected
    }


def check_model(inputs: BuildInputs) -> Model:
    """Have what the family's `forward` reads and returns checked, with and without debug flags."""
    family, name = inputs.family, inputs.model.architecture

    # Always, because a wrong shape fails in operations, which would be blamed. The host looks at
    # shapes alone, once a step.
    def forward(
        params: Params, config: ModelConfig, batch: Batch, attend: Attend, ops: Ops
    ) -> Tensor:
        hidden: object = family.forward(params, config, batch, attend, ops)
        # A family that scores by itself may have states of another width.
        width = config.hidden if family.logits is None else None
        if (
            not isinstance(hidden, Tensor)
            or hidden.dim() != 2
            or len(hidden) != len(batch.tokens)
            or hidden.shape[1] != (width or hidden.shape[1])
        ):
            found = list(hidden.shape) if isinstance(hidden, Tensor) else describe_type(hidden)
            raise PluginBroken(
                f"the model family {name!r}: forward: expected hidden states [{len(batch.tokens)}, "
                f"{width or 'hidden'}], got {found}"
            )
        return hidden

    return evolve(family, forward=forward)
