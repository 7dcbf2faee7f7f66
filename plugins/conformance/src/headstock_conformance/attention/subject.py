"""The backend that is checked: made for a case as an engine would make it, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from headstock import registry
from headstock.errors import CannotRun
from headstock.selection.capabilities import resolve_capabilities
from headstock.spi import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionQuery,
    AttentionSpec,
    DeviceEnv,
    Feature,
    GraphSupport,
    IntSet,
    LayerInfo,
)
from headstock.startup.assemble import make_attention_backend
from headstock_conformance.attention.cases import (
    MAX_ROWS,
    MAX_SEQ_LEN,
    AttentionCase,
    context_of,
    describe_pool,
    out_dim_of,
)

MakeBackend = Callable[[AttentionSpec, AttentionContext], AttentionBackend]


@frozen(kw_only=True)
class Subject:
    """An attention plugin, the machine in its query, and the device of its tensors.

    device: of tensors; differs from the machine's if kernels are replaced by stand-ins
    make: makes the backend; by default what the spec names
    opt: options, `NAME.FIELD=VALUE` each
    """

    spec: AttentionSpec
    env: DeviceEnv
    device: str
    make: MakeBackend = make_attention_backend
    opt: Sequence[str] = ()

    @property
    def claims(self) -> AttentionCapabilities:
        """The claims of the spec."""
        return self.spec.capabilities

    def resolve(self, query: AttentionQuery) -> AttentionCapabilities:
        """The plugin's capabilities here for such a model.   raises: CannotRun, PluginBroken"""
        return resolve_capabilities(self.spec, query, self.env)

    def serves(self, case: AttentionCase, *, contiguous: bool) -> bool:
        """Whether the plugin accepts a model of the case's shape here."""
        try:
            self.resolve(self.make_query(context_of(case, None), contiguous=contiguous))
        except CannotRun:
            return False
        return True

    def make_query(
        self,
        context: AttentionContext,
        *,
        windows: Sequence[int | None] = (None,),
        features: frozenset[Feature] = frozenset(),
        contiguous: bool = False,
    ) -> AttentionQuery:
        """The query of an engine with the context's shape.

        windows: one per KV group
        """
        (group,) = context.query.groups
        return evolve(
            context.query,
            phases=self.claims.phases,
            contiguous=contiguous,
            groups=tuple(evolve(group, features=features, window=each) for each in windows),
        )

    def open(
        self,
        case: AttentionCase,
        layers: Iterable[LayerInfo],
        *,
        graph: GraphSupport = GraphSupport.NEVER,
        layer_pools: Mapping[int, Tensor] | None = None,
        max_rows: int = MAX_ROWS,
        max_seq_len: int = MAX_SEQ_LEN,
        groups: int = 1,
        **terms: Any,
    ) -> AttentionBackend:
        """A backend for the case's pool, after its `resolve` for such a model.

        graph: what the case needs
        layer_pools: by layer, if each has its own pool
        groups: the number of KV groups
        terms: as in `make_query`
        raises: CannotRun, PluginBroken
        """
        context = context_of(
            case,
            registry.make_options(self.spec, self.opt),
            max_rows=max_rows,
            max_seq_len=max_seq_len,
        )
        infos = {layer.index: evolve(layer, out_dim=out_dim_of(case)) for layer in layers}
        windows = [find_window(infos.values(), group) for group in range(groups)]
        features = terms.pop("features", frozenset()) | find_features(infos.values())
        query = self.make_query(context, windows=windows, features=features, **terms)
        resolved = self.resolve(query)
        if resolved.graph < graph:
            raise CannotRun(f"graphs: expected {graph.name}, got {resolved.graph.name} here")
        pools = layer_pools or dict.fromkeys(infos, case.pool)
        parts = {index: describe_pool(evolve(case, pool=pool))[1] for index, pool in pools.items()}
        made = evolve(
            context,
            query=query,
            layers=infos,
            pools=dict(pools),
            kv={index: evolve(parts[index], group=each.group) for index, each in infos.items()},
        )
        return self.make(self.spec, made)


def find_window(layers: Iterable[LayerInfo], group: int) -> int | None:
    """How many latest tokens the pages of a group keep: as many as any of its layers sees."""
    windows = [layer.window for layer in layers if layer.group == group]
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None


def find_features(layers: Iterable[LayerInfo]) -> frozenset[Feature]:
    """The features that layers ask for."""
    asked_features = {
        Feature.SLIDING_WINDOW: any(layer.window is not None for layer in layers),
        Feature.SOFTCAP: any(layer.softcap > 0 for layer in layers),
        Feature.SINKS: any(layer.sinks is not None for layer in layers),
    }
    return frozenset(feature for feature, is_asked in asked_features.items() if is_asked)


def sample_set(numbers: IntSet, candidates: Iterable[int], most: int) -> list[int]:
    """Some numbers of a set: the preferred ones, else its first ones."""
    chosen_numbers = [number for number in candidates if number in numbers]
    if not chosen_numbers:
        chosen_numbers = list(numbers.values) or [numbers.step]
    return chosen_numbers[:most]
