"""Attention backends: they read the KV pool and never write it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import deep_iterable, instance_of, optional

from headstock.spi.environment import DeviceRange
from headstock.spi.int_set import IntSet
from headstock.spi.plugin import PluginSpec, check_path

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


class Phase(Enum):
    """What a row does in a step: fresh tokens, fresh tokens after earlier ones, or one token after
    earlier ones.
    """

    PREFILL = "prefill"
    EXTEND = "extend"
    DECODE = "decode"


class Feature(Enum):
    """What a model may ask of attention. A feature that a backend does not name is one it cannot
    do.
    """

    SLIDING_WINDOW = "sliding-window"
    SOFTCAP = "softcap"
    LSE = "lse"


class GraphSupport(IntEnum):
    """Which steps a CUDA graph of the backend may replay; each level includes those before it.

    ALWAYS needs `Planning.NONE` and a `capture_plan`: rows of any length, read from the device
    alone.
    """

    NEVER = 0
    DECODE = 1
    UNIFORM = 2
    ALWAYS = 3


class Planning(Enum):
    """Whether the backend needs host work before each step."""

    NONE = "none"
    PER_STEP = "per-step"


def check_triples(instance: object, attribute: object, value: frozenset[tuple[str, ...]]) -> None:
    """Raise ValueError unless all are (query, KV, output)."""
    if any(not isinstance(triple, tuple) or len(triple) != 3 for triple in value):
        raise ValueError(f"dtypes are triples (query, KV, output), got {sorted(value, key=str)}")


@frozen(kw_only=True)
class AttentionCapabilities:
    """What a backend can do. Nothing here has a default: what is left out cannot be claimed by
    accident.

    `dtypes` are (query, KV, output) triples by torch name ("bfloat16"); `gqa_ratios` are query
    heads per KV head; `page_sizes` are pool page sizes; `contiguous` says whether one region per
    sequence can be read, `paged` whether pages can.
    """

    phases: frozenset[Phase] = field(
        validator=deep_iterable(instance_of(Phase), instance_of(frozenset))
    )
    devices: tuple[DeviceRange, ...] = field(
        validator=deep_iterable(instance_of(DeviceRange), instance_of(tuple))
    )
    dtypes: frozenset[tuple[str, str, str]] = field(
        validator=[instance_of(frozenset), check_triples]
    )
    head_dims: IntSet = field(validator=instance_of(IntSet))
    gqa_ratios: IntSet = field(validator=instance_of(IntSet))
    page_sizes: IntSet = field(validator=instance_of(IntSet))
    paged: bool = field(validator=instance_of(bool))
    contiguous: bool = field(validator=instance_of(bool))
    graph: GraphSupport = field(validator=instance_of(GraphSupport))
    planning: Planning = field(validator=instance_of(Planning))
    features: frozenset[Feature] = field(
        validator=deep_iterable(instance_of(Feature), instance_of(frozenset))
    )


@frozen(kw_only=True)
class AttentionSpec(PluginSpec):
    """An attention backend as its entry point returns it.

    `implementation` names an `AttentionBackend`; `resolve`, when given, names a function
    `(AttentionQuery, DeviceEnv) -> AttentionCapabilities | tuple[Rejection, ...]` that may only
    narrow `capabilities`.
    """

    capabilities: AttentionCapabilities = field(validator=instance_of(AttentionCapabilities))
    resolve: str | None = field(default=None, validator=optional(check_path))


@frozen(kw_only=True)
class AttentionQuery:
    """What the engine asks of a backend. `page_size` is None while it is still open; `max_seq_len`
    counts tokens.
    """

    phases: frozenset[Phase]
    heads: int
    kv_heads: int
    head_dim: int
    q_dtype: str
    kv_dtype: str
    page_size: int | None
    contiguous: bool
    features: frozenset[Feature]
    max_rows: int
    max_seq_len: int


@frozen(kw_only=True, eq=False)
class AttentionContext:
    """All that a backend is built from. Two contexts share nothing, so two engines live in one
    process.

    pools: layer -> [pages, 2, page_size, kv_heads, head_dim]; `[:, 0]` holds keys and `[:, 1]`
    values
    `options` is the options class of the
    spec, or None without one.
    """

    query: AttentionQuery
    capabilities: AttentionCapabilities
    device: torch.device
    page_size: int
    pools: Mapping[int, Tensor]
    options: Any


@frozen(kw_only=True, eq=False)
class AttentionStep:
    """The rows of one step that a backend serves, in batch order. Decode steps have one query token
    in each row.

    query_start: [rows + 1] int32        context_lens: [rows] int32, with this step's tokens
    page_tables: one a KV group, [rows, max_pages] int32; entries past a row's last page are 0 (the
        dummy page)
    host_query_lens, host_context_lens: [rows] int32 numpy, known without asking the device
    """

    phase: Phase
    query_start: Tensor
    context_lens: Tensor
    page_tables: tuple[Tensor, ...]
    host_query_lens: np.ndarray
    host_context_lens: np.ndarray

    @property
    def num_rows(self) -> int:
        """How many rows the step has."""
        return len(self.host_query_lens)

    @property
    def max_query_len(self) -> int:
        """The longest row's query tokens."""
        return int(self.host_query_lens.max(initial=0))

    @property
    def max_context_len(self) -> int:
        """The longest row's context, this step's tokens included."""
        return int(self.host_context_lens.max(initial=0))


@frozen(kw_only=True, eq=False)
class LayerInfo:
    """What a backend must know of the layer it serves.

    `index` is its key in `AttentionContext.pools`, `group` its place in
    `AttentionStep.page_tables`. `window` is the number of latest tokens a query sees, itself
    included (None = all); `softcap` is 0 for none. Scores are the products times `scale * k_scale`,
    the output is times `v_scale`; nothing sets `k_scale` and `v_scale` yet.
    """

    index: int
    group: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0


class AttentionBackend(ABC):
    """Attention over the pool, for the phases its spec names."""

    @abstractmethod
    def __init__(self, context: AttentionContext) -> None:
        """Allocate what the backend needs between steps.

        raises: ValueError when the options or the machine do not suit it, with the next move
        """

    @abstractmethod
    def plan(self, step: AttentionStep) -> Any:
        """What `forward` needs for every layer of the step; made on the host, never reads the
        device.
        """

    @abstractmethod
    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`: no sync, no
        device-to-host read. `out` is of q's type, and what it holds before is undefined.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm, only
            with Feature.LSE
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of device memory that the backend holds for itself. For tests: the engine measures
        what is taken.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the backend holds. It is not used afterwards."""

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Allocate static buffers for graphs of these batch sizes. Called only when `graph` is
        above NEVER.
        """
        raise TypeError(f"{type(self).__name__} declares graph support but has no graph_init")

    def graph_plan(self, bucket: int, step: AttentionStep) -> Any:
        """A plan bound to the static buffers of `bucket`."""
        raise TypeError(f"{type(self).__name__} declares graph support but has no graph_plan")

    def graph_update(self, plan: Any, step: AttentionStep) -> None:
        """Bring a bound plan up to date in place, at the same addresses, before a replay."""
        raise TypeError(f"{type(self).__name__} declares graph support but has no graph_update")

    def capture_plan(self, step: AttentionStep) -> Any:
        """A plan for a graph that has the calls of `forward` in it, made while the graph is
        captured.

        The step's tensors are written anew before each replay, and are all that may be read; its
        host lengths are the most that any row may have. Rows without query tokens pad the step.
        """
        raise TypeError(
            f"{type(self).__name__} declares graph support ALWAYS but has no capture_plan"
        )
