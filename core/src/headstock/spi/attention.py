"""Attention backends: they read the KV pool and never write it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import deep_iterable, instance_of

from headstock.spi.environment import DeviceRange
from headstock.spi.int_set import IntSet
from headstock.spi.kv import Layout, LayoutKind
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from headstock.spi.batch import KVLayer


MAX_PREFIX_GROUPS = 8
"""Maximum groups of rows that share leading pages in a step of a graph."""


class Phase(Enum):
    """What a row computes in a step.

    PREFILL: the first tokens of its context
    EXTEND: several tokens after earlier ones
    DECODE: one token after earlier ones
    """

    PREFILL = "prefill"
    EXTEND = "extend"
    DECODE = "decode"


class Feature(Enum):
    """What a backend may be able to do; it lacks every feature that it does not name.

    SINKS: it reads `LayerInfo.sinks`
    SHARED_PREFIX: it reads `AttentionStep.shared`; the engine looks for rows that share pages only
        for such a backend
    """

    SLIDING_WINDOW = "sliding-window"
    SOFTCAP = "softcap"
    LSE = "lse"
    SINKS = "sinks"
    SHARED_PREFIX = "shared-prefix"


# Ordered, because runners ask for the least that they need.
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
    """Raise ValueError unless every entry is (query, KV, output)."""
    if any(not isinstance(triple, tuple) or len(triple) != 3 for triple in value):
        raise ValueError(f"dtypes are triples (query, KV, output), got {sorted(value, key=str)}")


@frozen(kw_only=True)
class AttentionCapabilities:
    """What a backend can do. No field has a default, so that nothing is claimed by accident.

    dtypes: triples (query, KV, output) by torch name ("bfloat16")
    gqa_ratios: query heads per KV head
    layouts: what it reads the pages of
    head_dims: of keys and values, in full layouts
    page_sizes: in tokens
    mixed_groups: whether KV groups that it serves may differ in layout, dtypes or heads; else it is
        made once for each shape
    paged: whether it reads pages
    contiguous: whether it reads one region a sequence
    """

    # Validated here, at the import of the spec: a list instead of a frozenset would else fail in
    # core, far from the plugin that gave it.
    phases: frozenset[Phase] = field(
        validator=deep_iterable(instance_of(Phase), instance_of(frozenset))
    )
    devices: tuple[DeviceRange, ...] = field(
        validator=deep_iterable(instance_of(DeviceRange), instance_of(tuple))
    )
    dtypes: frozenset[tuple[str, str, str]] = field(
        validator=[instance_of(frozenset), check_triples]
    )
    layouts: frozenset[LayoutKind] = field(
        validator=deep_iterable(instance_of(LayoutKind), instance_of(frozenset))
    )
    head_dims: IntSet = field(validator=instance_of(IntSet))
    gqa_ratios: IntSet = field(validator=instance_of(IntSet))
    page_sizes: IntSet = field(validator=instance_of(IntSet))
    mixed_groups: bool = field(validator=instance_of(bool))
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

    `implementation` names an `AttentionBackend`. `resolve` gives
    `AttentionCapabilities | tuple[Rejection, ...]`; it may only narrow `capabilities`.
    """

    capabilities: AttentionCapabilities = field(validator=instance_of(AttentionCapabilities))


@frozen(kw_only=True)
class GroupQuery:
    """What the layers of one KV group need of a backend.

    heads: of the queries
    window: how many latest tokens the pages keep; None for all
    features: what some layer of the group needs
    """

    layout: Layout
    heads: int
    q_dtype: str
    kv_dtype: str
    window: int | None
    features: frozenset[Feature]


@frozen(kw_only=True)
class AttentionQuery:
    """What the engine needs of a backend.

    groups: the KV groups whose pages it reads, one at least; groups that keep a state are left out,
        and so are those that another backend serves
    page_size: in tokens; None while it is still open
    max_rows: rows of a step
    max_seq_len: tokens of a sequence
    """

    phases: frozenset[Phase]
    groups: tuple[GroupQuery, ...]
    page_size: int | None
    contiguous: bool
    max_rows: int
    max_seq_len: int


@frozen(kw_only=True, eq=False)
class AttentionContext:
    """What a backend is built from. Two contexts share nothing, so two engines live in one process.

    layers: by number, those of the query's groups
    pools: layer -> its pages as they lie in memory; for full KV
        [pages, 2, page_size, kv_heads, head_dim], keys at `[:, 0]` and values at `[:, 1]`, for
        latent KV [pages, page_size, dim]
    kv: layer -> the same pages by their parts
    options: an instance of the spec's options class; None where the spec names none
    """

    query: AttentionQuery
    device: torch.device
    page_size: int
    layers: Mapping[int, LayerInfo]
    # By layer and not as one tensor: layers of different KV groups have pages of different shapes.
    pools: Mapping[int, Tensor]
    kv: Mapping[int, KVLayer]
    options: Any


@frozen(kw_only=True, eq=False)
class AttentionStep:
    """The rows of one step that a backend serves, in batch order.

    In a decode step each row has one query token.

    query_start: [rows + 1] int32
    context_lens: [rows] int32, this step's tokens included
    page_tables: one for each of `AttentionQuery.groups`, [rows, max_pages] int32; 0, the dummy
        page, past a row's last page
    host_query_lens, host_context_lens: [rows] int32 numpy, so that planning never waits for the
        device
    shared: the same step cut in two, where rows that decode share enough leading pages; a step
        with other rows has it in graphs alone. A backend that ignores it gives the same answer
    """

    # One phase for all its rows: a step has at most two parts, its decode rows and the others.
    phase: Phase
    query_start: Tensor
    context_lens: Tensor
    page_tables: tuple[Tensor, ...]
    # The same lengths as on the device: to read those would wait for the step that runs.
    host_query_lens: np.ndarray
    host_context_lens: np.ndarray
    shared: SharedPrefixes | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.host_query_lens)

    @property
    def max_query_len(self) -> int:
        """Query tokens of the row with the most."""
        return int(self.host_query_lens.max(initial=0))

    @property
    def max_context_len(self) -> int:
        """Context tokens of the longest row, this step's included."""
        return int(self.host_context_lens.max(initial=0))


@frozen(kw_only=True, eq=False)
class PrefixGroups:
    """Rows that decode and share leading pages; they are a step's first rows, group by group.

    There are at most `MAX_PREFIX_GROUPS`.

    counts: [groups] int32 numpy, the rows of each
    lens: [groups] int32 numpy, the tokens that they share, whole pages
    """

    counts: np.ndarray
    lens: np.ndarray


@frozen(kw_only=True, eq=False)
class SharedPrefixes:
    """A step cut in two, so that pages that several rows share are read once.

    Groups of rows share leading pages. Attention of such a row is that over its group's tokens and
    that over the rest, weighted by their sums of exponentials (LSE). Layers with a window, whose
    page tables may lack the leading pages, read the step as it is.

    prefixes: the groups as rows of a step: a group's query tokens are those of its rows, which
        follow each other from the first row on, and each of them sees the group's whole context. A
        group may have no rows. Its phase is EXTEND, but no token of the queries is in the context.
    rest: the rows of the step, in its phase, with the tokens that follow, at least those of the
        queries. Only rows with one query token are in groups, and they are the first of the step
    shared_lens: [rows] int32, how many leading tokens a row shares with its group; 0 where it has
        none, and `rest` is all there is
    """

    prefixes: AttentionStep
    rest: AttentionStep
    shared_lens: Tensor


@frozen(kw_only=True, eq=False)
class LayerInfo:
    """What a backend must know of a layer.

    index: its key in `AttentionContext.pools`
    group: its place in `AttentionStep.page_tables`
    scale: scores are the products of queries and keys times `scale * k_scale`
    window: how many latest tokens a query sees, itself included; None for all
    softcap: the bound of scores; 0 for none
    v_scale: the output is multiplied by it. Both are those of `LayerConfig`
    out_dim: how many elements a head of the output has; None for as many as one of the queries
    sinks: [heads] float32, a score for each head that is added to those of a query's tokens in the
        softmax, as it is, and has no value; None for none
    """

    index: int
    group: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    out_dim: int | None = None
    sinks: Tensor | None = None

    def empty_output(self, q: Tensor) -> Tensor:
        """A place for the output of these queries, dense and undefined.

        q: [tokens, heads, head_dim]    returns: [tokens, heads, out_dim]
        """
        # Not by slices of the shape: a call a layer is felt in a step of one token on a CPU.
        return q.new_empty(q.shape if self.out_dim is None else (*q.shape[:2], self.out_dim))


class AttentionBackend(ABC):
    """Attention over the pool, for the phases that its spec names."""

    @abstractmethod
    def __init__(self, context: AttentionContext) -> None:
        """Allocate what the backend needs between steps.

        raises: ValueError when the options or the machine do not suit it, with the next move
        """

    @abstractmethod
    def plan(self, step: AttentionStep) -> Any:
        """What `forward` needs for every layer of the step.

        Made on the host; the device is not read. With overlap two plans are alive: the next step
        is planned while this one computes.
        """

    @abstractmethod
    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        It neither waits for the device nor reads from it.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, out_dim] in q's type, undefined before;
            lse [tokens, heads] float32, natural logarithm, without sinks, only with Feature.LSE
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the backend holds. It is not used afterwards."""

    @property
    def min_shared_tokens(self) -> int | None:
        """How many tokens `AttentionStep.shared` must spare a step, in each layer, to be worth it.

        None: it never is. Only asked of a backend that names `Feature.SHARED_PREFIX`.
        """
        return None

    # The four methods of graphs are not abstract: a backend without graphs need not write them.
    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Allocate static buffers for graphs of these batch sizes; only if `graph` is not NEVER."""
        raise TypeError(f"{type(self).__name__} declares graph support but has no graph_init")

    def graph_plan(self, bucket: int, step: AttentionStep) -> Any:
        """A plan bound to the static buffers of `bucket`."""
        raise TypeError(f"{type(self).__name__} declares graph support but has no graph_plan")

    # `Planning.NONE`: called inside the capture, so replays repeat its copies and the host never
    # calls it again. `PER_STEP`: called before each replay, while the step before may still run.
    def graph_update(self, plan: Any, step: AttentionStep) -> None:
        """Bring a bound plan up to date in place, at the same addresses, before a replay."""
        raise TypeError(f"{type(self).__name__} declares graph support but has no graph_update")

    # FlashAttention's own package leaves undefined numbers where no row is, so it cannot claim
    # ALWAYS; FlashAttention-3 out of vLLM's library can
    # (docs/decisions/0016-replayed-prompt-steps.md).
    def capture_plan(self, step: AttentionStep) -> Any:
        """A plan for a graph that has the calls of `forward` in it, made during its capture.

        The step's tensors are overwritten before each replay and are all that may be read. Its
        host lengths are upper bounds: a runner may keep a graph for short contexts and another for
        all. Rows without query tokens pad the step. It may have `shared`, for backends with
        `Feature.SHARED_PREFIX` and `Planning.NONE`: as a decode step, and with
        `GraphSupport.ALWAYS` as one with prompts.
        """
        raise TypeError(
            f"{type(self).__name__} declares graph support ALWAYS or shared prefixes but has no "
            "capture_plan"
        )
