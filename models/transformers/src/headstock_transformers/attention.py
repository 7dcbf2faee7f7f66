"""The attention functions that transformers' modules call here."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from headstock.nn.kv import divide_by_scales, kv_cells
from headstock.spi import Attend, Batch, ModelConfig
from headstock_transformers.operations import FineOperations

PAGED = "headstock"
"""The name under which modules find attention over pages."""
PROBED = "headstock-probe"
"""The name under which modules find what only takes down how they call attention."""
LOCAL = "headstock-local"
"""The name under which each token sees itself alone, without pages."""
COMPARED = "headstock-compared"
"""The name under which each token gets its own values, and what attention gets is noted."""

_IGNORED = frozenset(
    "position_ids use_cache dropout output_attentions output_hidden_states past_key_values "
    "cache_position return_dict position_embeddings logits_to_keep output_router_logits "
    "use_return_dict".split()
)
"""Keywords that modules hand on and that change no attention over pages."""


@frozen(eq=False)
class Step:
    """What attention over pages needs of the step that runs.

    shared: what layers work out once for all, by a key of their own
    """

    batch: Batch
    config: ModelConfig
    attend: Attend
    operations: FineOperations
    shared: dict[Hashable, Any] = field(factory=dict)


@frozen(eq=False)
class MaskFunction:
    """What stands for a mask while modules are probed.

    function: transformers' own, of a sequence, a head, a query's position and those of keys
    """

    function: Any


@frozen(eq=False, kw_only=True)
class AttentionCall:
    """How a layer called attention.

    queries, keys, values: shapes, [sequences, heads, tokens, width]
    mask: None where the module made none
    scale, softcap: as in `LayerInfo`; scale is None where it is not one number
    window: what the call says of it; None for nothing
    sinks: `LayerInfo.sinks`, as the module holds them
    strange: keywords with a value that attention over pages would ignore
    """

    layer: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    mask: MaskFunction | None
    scale: float | None
    softcap: float
    window: int | None
    is_causal: bool
    sinks: Tensor | None
    strange: tuple[str, ...]


@frozen(eq=False)
class CallList:
    """The calls of one forward pass, in their order."""

    calls: list[AttentionCall] = field(factory=list)


# The functions are looked up by name, so that they cannot hold what belongs to one engine; two
# engines may step on two threads.
STEP: ContextVar[Step] = ContextVar("headstock_transformers_step")
CALLS: ContextVar[CallList] = ContextVar("headstock_transformers_calls")
INPUTS: ContextVar[list[tuple[Tensor, ...]]] = ContextVar("headstock_transformers_inputs")


def store_kv(step: Step, layer: int, kv: Tensor) -> None:
    """Put a step's keys and values into its pages.

    kv: [tokens, 2, kv_heads, head_dim]
    writes: the layer's pool; step.shared
    """
    pool, spec = step.batch.pools[layer], step.config.layers[layer]
    if spec.k_scale != 1 or spec.v_scale != 1:
        kv = divide_by_scales(kv, spec.k_scale, spec.v_scale)
    cells = step.shared.get(("cells", spec.group))
    if cells is None:
        cells = kv_cells(step.batch.slots[spec.group], pool.shape[2])
        step.shared["cells", spec.group] = cells
    step.operations.store_kv_(pool, cells, kv)


def _attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a step's queries over pages, which its keys and values are put into first.

    query, key, value: [1, heads, tokens, width]    returns: [1, tokens, heads, width of values]
    """
    step, layer = STEP.get(), int(module.layer_idx)  # type: ignore[arg-type]
    pool, width = step.batch.pools[layer], value.shape[-1]
    # Values that are narrower than keys are padded, and what comes of it is cut off again.
    if width < pool.shape[-1]:
        value = nn.functional.pad(value, (0, pool.shape[-1] - width))
    kv = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), 1)
    store_kv(step, layer, kv)
    queries = query[0].transpose(0, 1)
    # Backends read a token's heads as they lie together, which they do not behind a partial rope.
    if queries.stride()[1:] != (queries.shape[2], 1):
        queries = queries.contiguous()
    out = step.attend(queries, layer)
    return out[None, ..., :width].contiguous(), None


def _attend_locally(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What depends on a token's own query, key and value alone; shapes as of attention."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    weight = torch.tanh(query.float().mean(-1) + key.float().mean(-1))
    out = value * (1 + weight[..., None]).to(value.dtype)
    return out.transpose(1, 2).contiguous(), None


def _take_inputs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Note what attention gets; the result is each token's own values."""
    INPUTS.get().append((query, key, value))
    groups = query.shape[1] // key.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


def _take_down(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Note the call; the result has the shape of attention."""
    strange = {
        name: value
        for name, value in kwargs.items()
        if name not in _NAMED and name not in _IGNORED and value is not None and value is not False
    }
    scale = kwargs.get("scaling")
    window = kwargs.get("sliding_window")
    CALLS.get().calls.append(
        AttentionCall(
            layer=int(getattr(module, "layer_idx", -1)),
            queries=tuple(query.shape),
            keys=tuple(key.shape),
            values=tuple(value.shape),
            mask=attention_mask if isinstance(attention_mask, MaskFunction) else None,
            scale=query.shape[-1] ** -0.5
            if scale is None
            else float(scale)
            if isinstance(scale, int | float)
            else None,
            softcap=float(kwargs.get("softcap") or 0.0),
            window=None if window is None else int(window),
            is_causal=bool(kwargs.get("is_causal", getattr(module, "is_causal", True))),
            sinks=kwargs.get("s_aux"),
            strange=tuple(sorted(strange)),
        )
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return torch.zeros(shape, dtype=query.dtype, device=query.device), None


_NAMED = frozenset(("scaling", "sliding_window", "softcap", "is_causal", "s_aux"))
"""Keywords that the probe reads."""


def _skip_experts(module: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The shape of what experts give."""
    return torch.zeros_like(hidden)


def _keep_function(*args: Any, mask_function: Any, **kwargs: Any) -> MaskFunction:
    """Stand for a mask by the function that would make it."""
    return MaskFunction(mask_function)


# No mask is registered for attention over pages, so that transformers makes none.
for _name, _function in MappingProxyType(
    {
        PAGED: _attend_paged,
        LOCAL: _attend_locally,
        COMPARED: _take_inputs,
        PROBED: _take_down,
    }
).items():
    AttentionInterface.register(_name, _function)
AttentionMaskInterface.register(PROBED, _keep_function)
ExpertsInterface.register(PROBED, _skip_experts)
