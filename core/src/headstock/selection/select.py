"""Select the plugins that an engine is made of."""

from __future__ import annotations

from functools import partial
from typing import Any

from attrs import evolve, frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import (
    CannotRun,
    UsageError,
    suggest_name,
)
from headstock.ops.bound import BoundOps, OperationTable
from headstock.ops.fine_tier import FineTierOps
from headstock.selection import auto_choices
from headstock.selection.attention_choice import (
    JoinedCapabilities,
    SelectedBackend,
    join_capabilities,
    name_backends,
    select_attention,
)
from headstock.selection.auto_choices import FastestChoices
from headstock.selection.candidates import find_ready_spec, select_first_accepted
from headstock.selection.capabilities import (
    explain_device_mismatch,
)
from headstock.selection.executors import select_executor
from headstock.selection.grammars import select_grammar
from headstock.selection.model_needs import AttentionNeeds, find_quant_kind
from headstock.selection.processors import SelectedProcessor, select_processors
from headstock.selection.proposers import SelectedProposer, select_proposer
from headstock.selection.refusals import (
    check_claimed,
    check_resolve,
    configure_operations,
    make_ops_options,
    make_part_query,
    note_part,
)
from headstock.selection.runner_choice import needs_graphs, resolve_runner_name
from headstock.spi import (
    CacheSpec,
    DeviceEnv,
    ExecutorSpec,
    GrammarSpec,
    LayoutKind,
    ModelConfig,
    ModelSpec,
    Ops,
    OpsSpec,
    PartQuery,
    Phase,
    PluginSpec,
    RunnerSpec,
    SchedulerSpec,
)


@frozen(kw_only=True)
class SelectedPlugins:
    """The plugins of an engine.

    `attention` has one entry when one backend serves all phases and KV groups. `operations` are
    those of `ops`. Without a proposer no row has drafts. `tuned_options` are what was measured of
    `ops`, as `--opt` has it.
    """

    attention: tuple[SelectedBackend, ...]
    cache: CacheSpec
    scheduler: SchedulerSpec
    runner: RunnerSpec
    ops: OpsSpec
    operations: Ops
    tuned_options: tuple[str, ...] = ()
    proposer: SelectedProposer | None = None
    processors: tuple[SelectedProcessor, ...] = ()
    grammar: GrammarSpec | None = None
    executor: ExecutorSpec | None = None

    @property
    def max_drafts(self) -> int:
        """The most drafts of a row in a step; 0 without a proposer."""
        return 0 if self.proposer is None else self.proposer.max_drafts

    @property
    def has_own_drafts(self) -> bool:
        """Whether the model's own layers make the drafts."""
        return self.proposer is not None and self.proposer.spec.by_model

    @property
    def drafts_all(self) -> bool:
        """Whether nearly every row gets drafts, as from a model: then no steps overlap."""
        spec = None if self.proposer is None else self.proposer.spec
        return spec is not None and (spec.by_model or spec.takes_model)

    @property
    def specs(self) -> tuple[PluginSpec, ...]:
        """What the plugins say of themselves."""
        return (
            *(choice.spec for choice in self.attention),
            self.cache,
            self.scheduler,
            self.runner,
            self.ops,
            *(() if self.proposer is None else (self.proposer.spec,)),
            *(selected.spec for selected in self.processors),
            *(() if self.grammar is None else (self.grammar,)),
            *(() if self.executor is None else (self.executor,)),
        )

    @property
    def attention_name(self) -> str:
        """The backends as `--attn` names them."""
        return name_backends(self.attention)

    @property
    def prompt_capabilities(self) -> JoinedCapabilities:
        """What the backends of prompts can do together."""
        return join_capabilities(self.attention, Phase.PREFILL)

    @property
    def decode_capabilities(self) -> JoinedCapabilities:
        """What the backends of decoding can do together."""
        return join_capabilities(self.attention, Phase.DECODE)


@frozen(kw_only=True)
class _Acceptor:
    """Accepts parts that can run here. Each method returns a part or raises the reason why not."""

    config: EngineConfig
    env: DeviceEnv
    needs: AttentionNeeds
    fastest: FastestChoices | None

    def accept_part(self, query: PartQuery, kind: str, name: str, label: str) -> Any:
        """Accept a part that asks for nothing but what it says itself.

        raises: UnknownPlugin, PluginBroken, SpiMismatch, CannotRun with the reasons
        """
        spec = find_ready_spec(kind, name, self.env)
        check_resolve(spec, label, query, self.env)
        return spec

    def accept_runner(
        self,
        query: PartQuery,
        prompts: JoinedCapabilities,
        decode: JoinedCapabilities,
        ops_name: str,
        name: str,
    ) -> RunnerSpec:
        """Accept a runner over these backends and these operations.   raises: as any part"""
        spec: RunnerSpec = find_ready_spec("runner", name, self.env)
        if explain_device_mismatch(spec, self.env):
            raise CannotRun(f"runner (--runner) {name} cannot run on {self.env}; set it to eager")
        # In contiguous mode pages are as long as sequences; graphs were left out of it
        # (docs/decisions/0008-contiguous-mode.md).
        if self.needs.contiguous and needs_graphs(spec):
            raise CannotRun(
                f"runner (--runner) {name} replays graphs, and paged_attn (--paged-attn) off "
                "runs without; set the runner to eager"
            )
        if self.config.cuda_graph_max_bs == 0 and needs_graphs(spec):
            raise CannotRun(
                f"runner (--runner) {name} replays graphs, and cuda_graph_max_bs "
                "(--cuda-graph-max-bs) 0 turns graphs off"
            )
        if query.model.draft_layers and not spec.capabilities.drafts:
            raise CannotRun(
                f"runner (--runner) {name} returns no drafts of the model's own layers, which "
                f"proposer (--proposer) {self.config.proposer} asks for; set the runner to eager"
            )
        if query.model.draft_layers and needs_graphs(spec):
            planning = next((each for each in (prompts, decode) if not each.takes_bounds), None)
            if planning is not None:
                raise CannotRun(
                    f"runner (--runner) {name} replays graphs, and {planning.names!r} plans from "
                    "lengths of the host, while how many drafts are right is known on the device "
                    "alone; set the runner to eager, or attn (--attn) to fa or triton"
                )
        if not query.model.is_capturable and needs_graphs(spec):
            obstacle = query.model.capture_obstacle
            raise CannotRun(
                f"runner (--runner) {name} replays graphs, and the forward pass of "
                f"{query.model.architecture} cannot be captured{': ' if obstacle else ''}"
                f"{obstacle}; set the runner to eager"
            )
        check_layouts(
            self.needs,
            spec.capabilities.layouts,
            f"runner (--runner) {name} runs",
            "it to eager",
        )
        check_claimed(
            spec.capabilities.models, f"runner (--runner) {name} runs", query.model.architecture
        )
        check_claimed(
            spec.capabilities.ops, f"runner (--runner) {name} runs over ops (--ops)", ops_name
        )
        if decode.graph < spec.capabilities.needs_graph:
            raise CannotRun(
                f"runner (--runner) {name} needs graph support "
                f"{spec.capabilities.needs_graph.name} of the decode backend, and "
                f"{decode.names!r} has {decode.graph.name}; set the runner to "
                "eager"
            )
        check_resolve(spec, "runner (--runner)", query, self.env)
        return spec

    def accept_ops(self, query: PartQuery, name: str) -> tuple[OpsSpec, Ops]:
        """Accept a set of operations, configured for the model.   raises: as any part"""
        spec: OpsSpec = find_ready_spec("ops", name, self.env)
        if explain_device_mismatch(spec, self.env):
            raise CannotRun(f"ops (--ops) {name} cannot run on {self.env}; set it to torch")
        if self.needs.dtype not in spec.capabilities.dtypes:
            raise CannotRun(
                f"ops (--ops) {name} does not serve {self.needs.dtype}; set it to torch, or change "
                "dtype (--dtype)"
            )
        check_layouts(
            self.needs, spec.capabilities.layouts, f"ops (--ops) {name} writes", "it to torch"
        )
        kind = find_quant_kind(self.config)
        if kind is not None and kind not in spec.capabilities.formats:
            raise CannotRun(
                f"ops (--ops) {name} multiplies by no weights in {kind.value}; set quant (--quant) "
                "to off, or choose other ops"
            )
        tuned = () if self.fastest is None else self.fastest.list_options(name)
        options = () if spec.options is None else (make_ops_options(spec, tuned, self.config.opt),)
        check_resolve(spec, "ops (--ops)", query, self.env)
        operations: Ops = registry.make_part(spec, Ops, *options)
        if query.model.draft_layers and not isinstance(operations, FineTierOps):
            raise CannotRun(
                f"ops (--ops) {name} has no fine operations, of which layers that guess further "
                "tokens are composed; set it to torch"
            )
        configure_operations(spec, operations, query, self.env)
        return spec, operations


def select_plugins(
    config: EngineConfig,
    env: DeviceEnv,
    needs: AttentionNeeds,
    fastest: FastestChoices | None = None,
) -> SelectedPlugins:
    """Select the plugins that `config` names, or those that `auto` stands for; each can run here.

    With `fastest`, `auto` begins with that.

    raises: UnknownPlugin, PluginBroken, SpiMismatch, CannotRun with the reasons
    """
    acceptor = _Acceptor(config=config, env=env, needs=needs, fastest=fastest)
    # Attention first: runners depend on the graph support of the decode backend. Each part is told
    # which were chosen before it.
    attention = select_attention(config.attn, env, needs, None if fastest is None else fastest.attn)
    query = note_part(make_part_query(config, needs), "attention", name_backends(attention))
    ops_spec, operations = select_first_accepted(
        config.ops,
        auto_choices.move_to_front(auto_choices.OPS, None if fastest is None else fastest.ops),
        partial(acceptor.accept_ops, query),
        "ops (--ops)",
    )
    query = note_part(query, "ops", ops_spec.name)
    cache = acceptor.accept_part(query, "cache", config.cache_type, "cache_type (--cache-type)")
    query = note_part(query, "cache", cache.name)
    scheduler = acceptor.accept_part(
        query, "scheduler", config.scheduler, "scheduler (--scheduler)"
    )
    query = note_part(query, "scheduler", scheduler.name)
    prompts, decode = (
        join_capabilities(attention, phase) for phase in (Phase.PREFILL, Phase.DECODE)
    )
    runner = select_first_accepted(
        resolve_runner_name(config, env),
        auto_choices.RUNNERS,
        partial(acceptor.accept_runner, query, prompts, decode, ops_spec.name),
        "runner (--runner)",
    )
    return SelectedPlugins(
        attention=attention,
        cache=cache,
        scheduler=scheduler,
        runner=runner,
        ops=ops_spec,
        operations=operations,
        tuned_options=() if fastest is None else fastest.list_options(ops_spec.name),
        proposer=select_proposer(config, needs, query, env),
        processors=select_processors(config, query, env),
        grammar=select_grammar(config, query, env),
        executor=select_executor(config),
    )


def bind_operations(
    parts: SelectedPlugins, model: ModelConfig
) -> tuple[SelectedPlugins, OperationTable]:
    """Bind the operations to the model: each is the set's own or composed, by layer.

    raises: CannotRun, PluginBroken
    """
    bound = BoundOps(parts.ops.name, parts.operations, model)
    return evolve(parts, operations=bound), bound.table


def check_layouts(
    needs: AttentionNeeds, served: frozenset[LayoutKind], who: str, instead: str
) -> None:
    """Raise CannotRun when the model has a layout that is not served: `who` and a verb."""
    missing = sorted(kind.value for kind in needs.layouts - served)
    if missing:
        kinds = " and ".join(sorted(kind.value for kind in served)) or "no"
        raise CannotRun(
            f"{who} {kinds} KV alone, and the model keeps {' and '.join(missing)} KV; set {instead}"
        )


def check_plugin_options(config: EngineConfig, parts: SelectedPlugins, family: ModelSpec) -> None:
    """Check `--opt`: each names a field of a selected plugin, and its value is valid.

    raises: UsageError, PluginBroken for options that nothing can read
    """
    specs = [*parts.specs, family]
    stray = registry.find_unclaimed(config.opt, specs)
    if stray:
        names = [spec.name for spec in specs]
        hint = suggest_name(stray[0].partition(".")[0], names)
        raise UsageError(
            f"opt (--opt) {stray[0]}: no chosen plugin has that name; chosen: "
            f"{', '.join(names)}{hint}"
        )
    for spec in specs:
        registry.make_options(spec, registry.leave_to_namesakes(spec, config.opt, specs))
