"""Build an engine's parts from a configuration, in the order in which memory is used."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import attrs
import torch
from attrs import frozen
from torch import Tensor

from headstock import weights
from headstock.callbacks import ProgressCallback
from headstock.config import EngineConfig
from headstock.debug.canary import Canary
from headstock.debug.operation_reference import PlainWeights
from headstock.errors import format_count
from headstock.execution.abstract_executor import Executor
from headstock.execution.buffers import Buffers, BufferShape, allocate_buffers
from headstock.grammar import NO_REQUESTS, AdmittedRequests, GrammarRows
from headstock.logs import log_event
from headstock.ops.bound import OperationTable
from headstock.scheduler import Limits
from headstock.selection.grammars import make_grammar_rows
from headstock.selection.model_needs import find_quant_kind
from headstock.selection.negotiate import Terms
from headstock.selection.request_args import RequestArgs
from headstock.selection.select import (
    SelectedPlugins,
)
from headstock.spi import (
    DeviceEnv,
    GraphSupport,
    ModelConfig,
    ParamSpec,
    Ranks,
    ReplaySizes,
    Weight,
)
from headstock.startup.assemble import assemble_executor
from headstock.startup.blame import PluginNames, blame_plugins
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.decisions import DecidedParts, decide_parts
from headstock.startup.device import (
    reclaim_free_bytes,
)
from headstock.startup.graph_captures import (
    LateCaptures,
    capture_runner_graphs,
)
from headstock.startup.joining import JoiningRanks
from headstock.startup.kept_profile import KeptProfile, find_kept_profile
from headstock.startup.memory_plan import (
    MemoryPlan,
    format_bytes,
)
from headstock.startup.model_loading import (
    check_parameters,
    load_onto_device,
)
from headstock.startup.part_hooks import NO_HOOKS, PartHooks
from headstock.startup.pool_memory import plan_device_memory, reserve_buffers
from headstock.startup.profile_run import prove_readiness
from headstock.startup.proposer_start import OpenModel, started_proposer
from headstock.startup.ranks import start_ranks
from headstock.startup.scheduler_limits import make_limits
from headstock.startup.start_times import StartTimes, begin_start
from headstock.startup.state_rows import cut_rows

LOG = logging.getLogger(__name__)

MAX_QUIET_CANARY_BYTES = 1 << 30
"""Bytes of the largest pool that the canary reads in every step without a warning.

Reading it takes about a quarter of a second a step on one thread of a CPU.
"""


@frozen(kw_only=True, eq=False)
class EngineBuild:
    """An engine's parts and the decisions behind them.

    no_text: why the model gives vectors alone; empty where it gives text
    request_args: what requests may give the plugins
    weights: what loading made of quantized weights; empty for others
    grammars: follows the answers that a grammar rules; None where none can be ruled
    notes: lines for the user
    graph_sizes: the steps that have graphs, those of later captures too
    late_captures: the graphs that are still to be captured
    kept_profile: where the profile run's figures are kept
    start: names and seconds of the start's parts, in order
    other_starts: those of the other ranks, in their order
    """

    config: EngineConfig
    env: DeviceEnv
    directory: Path
    model: ModelConfig
    no_text: str
    parts: SelectedPlugins
    request_args: RequestArgs
    terms: Terms
    operations: OperationTable
    weights: str
    memory: MemoryPlan
    limits: Limits
    executor: Executor
    grammars: GrammarRows | None
    notes: tuple[str, ...]
    graph_sizes: ReplaySizes
    late_captures: LateCaptures
    kept_profile: KeptProfile
    start: tuple[tuple[str, float], ...]
    other_starts: tuple[tuple[tuple[str, float], ...], ...]


def build_engine(
    config: EngineConfig,
    on_progress: ProgressCallback | None = None,
    hooks: PartHooks = NO_HOOKS,
    admitted: AdmittedRequests = NO_REQUESTS,
    ranks: Ranks | None = None,
    open_model: OpenModel | None = None,
) -> EngineBuild:
    """Build the parts for `config`, wrapped by `hooks`, and load the weights.

    admitted: the engine's live requests, whose grammars the masks of a step read
    open_model: as in `ProposerContext`; None where no proposer is asked
    ranks: those of the engine, if they are started; they end where this raises
    raises: UsageError, PluginBroken, SpiMismatch, CannotRun, ModelError
    """
    # Whatever a plugin raises in any of its functions, the error names it.
    names = PluginNames.from_config(config)
    if ranks is None:
        with blame_plugins(names):
            ranks = start_ranks(config)
    try:
        with blame_plugins(names):
            ranks.begin()
            return _build_parts(config, on_progress, hooks, admitted, ranks, open_model)
    except BaseException as error:
        reason = ranks.explain(error)
        ranks.close()
        if reason is error:
            raise
        raise reason from error


def run_rank(ranks: Ranks) -> None:
    """Build another rank than 0, and follow rank 0, whose configuration it has, to its end.

    raises: as `build_engine`
    """
    executor = build_engine(EngineConfig(), ranks=ranks).executor
    try:
        ranks.follow(executor)
    finally:
        executor.close()


def _build_parts(
    config: EngineConfig,
    on_progress: ProgressCallback | None,
    hooks: PartHooks,
    admitted: AdmittedRequests,
    ranks: Ranks,
    open_model: OpenModel | None,
) -> EngineBuild:
    """Build the parts; what plugins raise comes through.   raises: as `build_engine`"""
    # A program that uses headstock may have done anything before; a command has imported.
    times = begin_start(count_process=config.is_command or ranks.index > 0)
    # Every refusal comes before the weights load, which can take minutes.
    decided = decide_parts(ranks, config, times)
    times.end_part("plugins")
    # A second model takes its memory before the rest is divided.
    with started_proposer(decided, open_model):
        return _build_decided(decided, on_progress, hooks, admitted, ranks, times)


def _build_decided(
    decided: DecidedParts,
    on_progress: ProgressCallback | None,
    hooks: PartHooks,
    admitted: AdmittedRequests,
    ranks: Ranks,
    times: StartTimes,
) -> EngineBuild:
    """Build what was decided.   raises: as `build_engine`"""
    config, env, model, parts = decided.config, decided.env, decided.part, decided.parts
    notes, terms = list(decided.notes), decided.terms
    device = torch.device(env.device)
    free = reclaim_free_bytes(device)
    if device.type == "cpu":
        free //= ranks.count  # they share the machine's memory
    joining = JoiningRanks(ranks, device)
    inputs = _load_model(decided, device, free, joining, hooks, on_progress, times)
    directory = decided.chosen.directory
    shape = BufferShape(
        groups=model.kv_groups,
        device=device,
        kv_dtype=getattr(torch, terms.kv_dtype),
        dtype=getattr(torch, decided.dtype),
        page_size=terms.page_size or decided.max_len,
        rows=config.max_running_requests,
        state_pages=1 + parts.max_drafts,
    )
    inputs, shape = cut_rows(inputs, shape, free, notes, ranks)
    config = inputs.config
    grammars = make_grammar_rows(config, parts.grammar, directory, decided.chosen.model, admitted)
    inputs = attrs.evolve(inputs, masks=ranks.connect_masks(grammars))
    # After the weights and before the pool, which may use all memory that remains.
    kept = find_kept_profile(inputs, env, directory, decided.max_len)
    memory = plan_device_memory(
        inputs,
        shape,
        decided.max_len,
        free,
        kept,
        notes,
        ranks,
        on_progress,
        snapshot_ratio=config.snapshot_ratio if terms.snapshot_tokens else 0.0,
    )
    max_len = _cut_max_len(config, decided.max_len, memory, notes)
    allocate = hooks.wrap_allocation(allocate_buffers)
    buffers = reserve_buffers(memory, kept, lambda: allocate(shape, memory.num_pages, max_len))
    limits = make_limits(config, parts, terms, memory, model, max_len, env.device)
    assembled = assemble_executor(inputs, buffers, max_len)
    times.end_part("memory")
    # Graphs come last: they hold the addresses of the buffers that serve.
    graphs = capture_runner_graphs(assembled, inputs, memory, kept, ranks, on_progress)
    times.end_part("graphs")
    notes += [decided.graph_note] if decided.graph_note and graphs.sizes.rows else []
    if assembled.watch is not None:
        assembled.watch.is_on = True  # captures and the profile run are not watched
    other_starts = ranks.collect(times.parts)
    executor = hooks.wrap_executor(ranks.connect(assembled.executor))
    if ranks.count > 1 and not ranks.index:
        prove_readiness(executor)
        times.end_part("first step")
    return EngineBuild(
        config=config,
        env=env,
        directory=directory,
        model=decided.chosen.model,
        no_text=decided.chosen.no_text,
        parts=parts,
        request_args=decided.request_args,
        terms=terms,
        operations=decided.operations,
        weights=decided.weights,
        memory=memory,
        limits=attrs.evolve(limits, schedule=hooks.wrap_scheduler(limits.schedule)),
        executor=_watch_free_pages(inputs, memory, buffers, executor),
        grammars=grammars,
        notes=(*notes, *graphs.notes),
        graph_sizes=graphs.sizes,
        late_captures=graphs.late,
        kept_profile=kept,
        start=tuple(times.parts),
        other_starts=tuple(tuple((name, each) for name, each in parts) for parts in other_starts),
    )


def _unpack(dtype: str, spec: ParamSpec, weight: Weight) -> Tensor:
    """The plain tensor of a packed weight of a model in that type."""
    out = torch.empty(spec.shape, dtype=getattr(torch, dtype), device=weight.tensor.device)
    weights.dequantize_(weight, out)
    return out


def _load_model(
    decided: DecidedParts,
    device: torch.device,
    free: int,
    joining: JoiningRanks,
    hooks: PartHooks,
    on_progress: ProgressCallback | None,
    times: StartTimes,
) -> BuildInputs:
    """Load the weights onto the device and bind the operations to them.

    free: bytes of the device that were free before
    raises: as `build_engine`
    """
    config, chosen, operations = decided.config, decided.chosen, decided.parts.operations
    unpack = partial(_unpack, decided.dtype)
    plain = PlainWeights(operations.prepare, unpack) if config.debug_ops else None
    # What is packed already stays as it is.
    quant = None if chosen.read.formats else find_quant_kind(config)
    params = load_onto_device(
        config,
        chosen.directory,
        chosen.read.family,
        decided.part,
        chosen.model,
        decided.dtype,
        quant,
        chosen.read.formats,
        device,
        decided.max_len,
        operations,
        operations.prepare if plain is None else plain.prepare,
        free,
        joining.watch(on_progress),
    )
    times.end_part("weights")
    operations.bind(params, decided.part, joining.wait())
    if joining.ranks.count > 1:
        times.end_part("ranks")
    check_parameters(chosen.read, params, decided.part)
    return BuildInputs(
        config=config,
        parts=decided.parts,
        needs=decided.needs,
        family=chosen.read.family,
        model=decided.part,
        params=params,
        hooks=hooks,
        plain_params=None if plain is None else plain.name_by(params),
    )


def _cut_max_len(config: EngineConfig, max_len: int, memory: MemoryPlan, notes: list[str]) -> int:
    """Return the tokens of a request at most, for which the pool must have room.

    writes: notes
    """
    # A sequence that the whole pool cannot hold could never end, however often it is preempted.
    if memory.longest >= max_len:
        return max_len
    cut = (
        f"max_seq_len (--max-seq-len) is cut from {max_len} to "
        f"{format_count(memory.longest, 'token')}, all that the KV pool can hold"
    )
    notes.append(cut)
    if config.max_seq_len is not None:
        LOG.warning(log_event("sequences are shorter than asked for", note=cut))
    return memory.longest


def _watch_free_pages(
    inputs: BuildInputs, memory: MemoryPlan, buffers: Buffers, executor: Executor
) -> Executor:
    """Wrap the executor in the canary, which watches free pages, under `--debug-canary`."""
    if not inputs.config.debug_canary:
        return executor
    if memory.pool > MAX_QUIET_CANARY_BYTES:
        LOG.warning(
            log_event(
                "the whole KV pool is read in every step",
                because="debug_canary (--debug-canary)",
                pool=format_bytes(memory.pool),
                instead="num_pages (--num-pages) 256, or as few as the requests need",
            )
        )
    # Graphs pad their batches, and padding rows write to the dummy page; so do the model's own
    # drafts past a row's pages.
    replays = inputs.parts.runner.capabilities.needs_graph > GraphSupport.NEVER
    padded = replays or inputs.parts.has_own_drafts
    return Canary(executor, buffers, inputs.model.kv_groups, padded=padded)
