"""Select the proposer of an engine, if it has one."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun, PluginBroken, UsageError, shorten
from headstock.scheduler.limits import MAX_DRAFTS
from headstock.selection.model_needs import AttentionNeeds
from headstock.selection.refusals import check_resolve
from headstock.spi import DeviceEnv, KVGroup, PartQuery, Proposer, ProposerSpec, StateKV


@frozen(kw_only=True)
class SelectedProposer:
    """A proposer, made with its options; it proposes at most `max_drafts` tokens a row."""

    spec: ProposerSpec
    proposer: Proposer
    max_drafts: int


def find_own_proposer(config: EngineConfig) -> str:
    """Find the chosen proposer if the model's own layers make its drafts; else empty.

    raises: UnknownPlugin, PluginBroken, SpiMismatch
    """
    spec = _load_spec(config)
    return spec.name if spec is not None and spec.by_model else ""


def _load_spec(config: EngineConfig) -> ProposerSpec | None:
    """Load what the chosen proposer says of itself; None for `off`.

    raises: UnknownPlugin, PluginBroken, SpiMismatch; UsageError for a second model without use
    """
    spec: ProposerSpec | None = None
    if config.proposer != "off":
        spec = registry.load_spec("proposer", config.proposer)
    if config.draft_model is not None and (spec is None or not spec.takes_model):
        raise UsageError(
            f"draft_model (--draft-model) {shorten(config.draft_model)}: proposer (--proposer) "
            f"{config.proposer} takes no second model; set it to draft, or leave the model out"
        )
    return spec


def find_state_obstacle(groups: Sequence[KVGroup]) -> str:
    """Find why a model with these KV groups takes no drafts; empty when it does."""
    for number, group in enumerate(groups):
        if isinstance(group.layout, StateKV) and group.layout.alignment is None:
            return (
                f"KV group {number} keeps a state that cannot go back behind a rejected draft, as "
                "its family names no alignment (StateKV.alignment)"
            )
    return ""


def select_proposer(
    config: EngineConfig, needs: AttentionNeeds, query: PartQuery, env: DeviceEnv
) -> SelectedProposer | None:
    """Select the proposer that the configuration names; None for `off`.

    raises: UnknownPlugin, PluginBroken, SpiMismatch, CannotRun
    """
    spec = _load_spec(config)
    if spec is None:
        return None
    registry.require_installed(spec)
    name = f"proposer (--proposer) {spec.name}"
    if not config.kv_cache:
        raise CannotRun(
            f"{name} needs the KV pool, and kv_cache (--kv-cache) off recomputes every token; "
            "leave out one of the two"
        )
    obstacle = find_state_obstacle(needs.model.kv_groups)
    if obstacle:
        raise CannotRun(f"{name}: {obstacle}; set it to off")
    if spec.takes_model and config.draft_model is None:
        raise UsageError(
            f"{name} takes its drafts from a second model; name it by draft_model (--draft-model)"
        )
    check_resolve(spec, "proposer (--proposer)", query, env)
    options = () if spec.options is None else (registry.make_options(spec, config.opt),)
    try:
        proposer: Proposer = registry.make_part(spec, Proposer, *options, expected=(ValueError,))
    except ValueError as error:
        raise CannotRun(f"{name}: {shorten(error, 400)}") from error
    count: object = proposer.max_drafts
    if not isinstance(count, int) or not 1 <= count <= MAX_DRAFTS:
        raise PluginBroken(
            f"the proposer {spec.name!r}: max_drafts: expected 1 to {MAX_DRAFTS}, got "
            f"{shorten(count)}; report it to its author"
        )
    return SelectedProposer(spec=spec, proposer=proposer, max_drafts=count)
