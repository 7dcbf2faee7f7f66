"""The backend that is checked: made for a case as an engine would make it, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import evolve, frozen

from headstock import registry
from headstock.conformance.attention.cases import AttentionCase, context_of, out_dim_of
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

MakeBackend = Callable[[AttentionSpec, AttentionContext], AttentionBackend]


@frozen(kw_only=True)
class Subject:
    """An attention plugin, the machine that it is asked about, and where its tensors are.

    device: of tensors; another one than the machine's where kernels are replaced by stand-ins
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
        """What the spec claims."""
        return self.spec.capabilities

    def resolve(self, query: AttentionQuery) -> AttentionCapabilities:
        """What the plugin can do here for such a model.   raises: CannotRun, PluginBroken"""
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
        window: int | None = None,
        features: frozenset[Feature] = frozenset(),
        contiguous: bool = False,
        groups: int = 1,
    ) -> AttentionQuery:
        """What an engine with the context's shape asks for."""
        (group,) = context.query.groups
        return evolve(
            context.query,
            phases=self.claims.phases,
            contiguous=contiguous,
            groups=(evolve(group, features=features, window=window),) * groups,
        )

    def open(
        self,
        case: AttentionCase,
        layers: Iterable[LayerInfo],
        *,
        graph: GraphSupport = GraphSupport.NEVER,
        **terms: Any,
    ) -> AttentionBackend:
        """A backend for the case's pool, asked first whether it serves such a model here.

        graph: what the case needs
        terms: as in `make_query`
        raises: CannotRun, PluginBroken
        """
        context = context_of(case, registry.make_options(self.spec, self.opt))
        infos = {layer.index: evolve(layer, out_dim=out_dim_of(case)) for layer in layers}
        windows = [layer.window for layer in infos.values() if layer.window is not None]
        # pages keep all that some layer sees
        window = max(windows) if len(windows) == len(infos) else None
        query = self.make_query(context, window=window, **terms)
        resolved = self.resolve(query)
        if resolved.graph < graph:
            raise CannotRun(f"graphs are {resolved.graph.name} here, and {graph.name} is wanted")
        pool, part = context.pools[0], context.kv[0]
        made = evolve(
            context,
            query=query,
            layers=infos,
            pools=dict.fromkeys(infos, pool),
            kv={index: evolve(part, group=layer.group) for index, layer in infos.items()},
        )
        return self.make(self.spec, made)


def sample_set(numbers: IntSet, candidates: Iterable[int], most: int) -> list[int]:
    """Some numbers of a set: those that are wanted, else its first ones."""
    chosen_numbers = [number for number in candidates if number in numbers]
    if not chosen_numbers:
        chosen_numbers = list(numbers.values) or [numbers.step]
    return chosen_numbers[:most]
