"""Select attention backends: which serves which KV groups, in which phases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

from headstock.errors import CannotRun, UsageError, shorten
from headstock.logs import log_event
from headstock.selection import auto_choices
from headstock.selection.candidates import find_ready_spec, try_each
from headstock.selection.capabilities import join_refusals, resolve_capabilities
from headstock.selection.model_needs import AttentionNeeds
from headstock.spi import (
    AttentionCapabilities,
    AttentionSpec,
    DeviceEnv,
    Feature,
    GraphSupport,
    Phase,
    Planning,
)

LOG = logging.getLogger(__name__)

_LABEL = "attn (--attn)"


@frozen(kw_only=True)
class SelectedBackend:
    """An attention backend for the phases and KV groups it serves.

    groups: numbers among `ModelConfig.kv_groups`
    capabilities: on this machine
    """

    spec: AttentionSpec
    phases: frozenset[Phase]
    groups: tuple[int, ...]
    capabilities: AttentionCapabilities


@frozen(kw_only=True)
class JoinedCapabilities:
    """What all backends that serve a phase can do together."""

    names: str
    graph: GraphSupport
    planning: Planning
    features: frozenset[Feature]

    @property
    def takes_bounds(self) -> bool:
        """Whether they plan rows from upper bounds of their lengths."""
        return self.graph is GraphSupport.ALWAYS and self.planning is Planning.NONE


def join_capabilities(backends: Iterable[SelectedBackend], phase: Phase) -> JoinedCapabilities:
    """Join the capabilities of the backends that serve the phase."""
    serving = [each for each in backends if phase in each.phases]
    claims = [each.capabilities for each in serving]
    plannings = {each.planning for each in claims}
    return JoinedCapabilities(
        names="+".join(dict.fromkeys(each.spec.name for each in serving)),
        # A runner brings plans up to date either inside a graph or before each replay.
        graph=min(each.graph for each in claims) if len(plannings) == 1 else GraphSupport.NEVER,
        planning=Planning.NONE if plannings == {Planning.NONE} else Planning.PER_STEP,
        features=frozenset.intersection(*(each.features for each in claims)),
    )


def name_backends(backends: Iterable[SelectedBackend]) -> str:
    """Name the backends as `--attn` does."""
    by_groups: dict[tuple[int, ...], list[str]] = {}
    for each in backends:
        by_groups.setdefault(each.groups, []).append(each.spec.name)
    return "+".join(dict.fromkeys(map(",".join, by_groups.values())))


def list_backend_names(attn: str) -> frozenset[str]:
    """The names of backends in a value of `--attn`."""
    return frozenset(name for pair in attn.split("+") for name in pair.split(","))


def select_attention(
    name_or_auto: str,
    env: DeviceEnv,
    needs: AttentionNeeds,
    fastest: str | None = None,
) -> tuple[SelectedBackend, ...]:
    """Select the attention backends for `--attn`, each with its capabilities on this machine.

    KV groups of one shape share a backend, or one for prompts and one for decoding: the first of
    those that `+` joins that serves them. `auto` is the device's list, after the fastest, where one
    was measured.

    raises: UsageError, CannotRun
    """
    names = auto_choices.list_attention_names(env, needs.kv_dtype)
    is_auto = name_or_auto == "auto"
    pairs = (
        auto_choices.move_to_front(names, fastest) if is_auto else tuple(name_or_auto.split("+"))
    )
    parts = needs.split_groups()
    chosen: dict[str, list[tuple[int, ...]]] = {pair: [] for pair in pairs}
    for groups in parts:

        def serve(pair: str, groups: tuple[int, ...] = groups) -> str:
            select_backends(pair, env, needs, groups)
            return pair

        try:
            several = is_auto or len(pairs) > 1
            pair = try_each(pairs, serve, _LABEL, name_or_auto) if several else serve(pairs[0])
        except CannotRun as error:
            if len(parts) == 1:
                raise
            others = [name for name in names if name not in pairs]
            raise _name_groups(error, groups, name_or_auto, others, serve) from error
        chosen[pair].append(groups)
    backends = tuple(
        backend
        for pair, served in chosen.items()
        if served
        for backend in _join_groups(pair, env, needs, served)
    )
    # A GPU's last choice is `sdpa`, in plain torch: without this line a library that is missing
    # would show as low speed alone.
    slowest = names[-1] if names else ""
    is_measured = fastest is not None and slowest in list_backend_names(fastest)
    if is_auto and len(names) > 1 and not is_measured and chosen.get(slowest):
        see = "headstock doctor, with the same flags"
        facts = {
            "setting": _LABEL,
            "chosen": slowest,
            "device": str(env),
            "see": see,
        }
        LOG.warning(log_event("auto fell back to the slowest backend", **facts))
    return backends


def _name_groups(
    error: CannotRun,
    groups: tuple[int, ...],
    value: str,
    others: Sequence[str],
    serve: Callable[[str], str],
) -> CannotRun:
    """The refusal with the KV groups that it is about, and what else serves them here.

    value: of `--attn`
    """
    refusal = f"KV groups {', '.join(map(str, groups))}: {error}"
    try:
        other = try_each(others, serve, _LABEL, value)
    except CannotRun:
        return CannotRun(refusal)
    return CannotRun(f"{refusal} Set {_LABEL} to {value}+{other}.")


def _join_groups(
    pair: str, env: DeviceEnv, needs: AttentionNeeds, parts: Sequence[tuple[int, ...]]
) -> tuple[SelectedBackend, ...]:
    """The backends of a pair over groups of several shapes: one for all if they can be mixed."""
    try:
        return select_backends(pair, env, needs, tuple(sorted(sum(parts, ()))))
    except CannotRun:
        if len(parts) == 1:
            raise
    return tuple(
        backend for groups in parts for backend in select_backends(pair, env, needs, groups)
    )


def select_backends(
    pair: str, env: DeviceEnv, needs: AttentionNeeds, groups: tuple[int, ...] | None = None
) -> tuple[SelectedBackend, ...]:
    """Select one backend for every phase, or one for prompts and one for decoding.

    groups: the numbers of the KV groups to serve; None for all that attention reads

    raises: UsageError, CannotRun
    """
    names = pair.split(",")
    if len(names) > 2:
        raise UsageError(
            "attn (--attn): expected one backend, or two as PREFILL,DECODE, got "
            f"{len(names)} in {shorten(pair)}"
        )
    groups = needs.token_groups if groups is None else groups
    prompts, decode = frozenset({Phase.PREFILL, Phase.EXTEND}), frozenset({Phase.DECODE})
    phases_by_name = (
        {names[0]: prompts | decode}
        if len(set(names)) == 1
        else dict(zip(names, (prompts, decode), strict=True))
    )
    choices, refusals = [], []
    for name, phases in phases_by_name.items():
        try:
            spec: AttentionSpec = find_ready_spec("attention", name, env)
            query = needs.make_query(phases, groups)
            choices.append(
                SelectedBackend(
                    spec=spec,
                    phases=phases,
                    groups=groups,
                    capabilities=resolve_capabilities(spec, query, env),
                )
            )
        except CannotRun as error:
            refusals.append(error)
    if len(refusals) > 1:
        raise CannotRun(join_refusals(refusals))
    if refusals:
        raise refusals[0]
    return tuple(choices)
