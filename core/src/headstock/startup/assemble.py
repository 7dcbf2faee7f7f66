"""Assemble an executor: attention, runner and sampling over given buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from headstock import registry
from headstock.debug.watch import DebugWatch
from headstock.errors import CannotRun, PluginBroken, describe_error, shorten
from headstock.execution.abstract_executor import Executor
from headstock.execution.attention_router import PhaseRouter
from headstock.execution.buffers import Buffers
from headstock.execution.executor import LocalExecutor
from headstock.execution.grouped_attention import GroupedAttention, GroupPart
from headstock.execution.pooling import PoolingTable
from headstock.execution.prefix_tracker import PrefixTracker
from headstock.execution.row_tables import DeviceTables
from headstock.execution.sampling_inputs import SamplingTable
from headstock.execution.step import StepMaker
from headstock.selection.attention_choice import SelectedBackend
from headstock.selection.select import SelectedPlugins
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionSpec,
    DecodeAttention,
    Feature,
    GraphSupport,
    LatentKV,
    LayerInfo,
    Layout,
    LayoutKind,
    ModelConfig,
    Params,
    Phase,
    Planning,
    Program,
    Runner,
)
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.memory_plan import count_scored_positions
from headstock.startup.watching import (
    check_model,
    make_watch,
    watch_attention,
    watch_operations,
    watch_processors,
)


@frozen(kw_only=True, eq=False)
class AssembledExecutor:
    """An executor, and those of its parts that are measured or captured.

    watch: what debug flags see of the steps; None without such flags
    """

    executor: Executor
    runner: Runner
    sampling: SamplingTable
    device: torch.device
    watch: DebugWatch | None


def assemble_executor(inputs: BuildInputs, buffers: Buffers, max_len: int) -> AssembledExecutor:
    """Assemble the executor over these buffers; no graph is captured yet.   raises: CannotRun"""
    model, parts = inputs.model, inputs.parts
    watch = make_watch(inputs, buffers.tokens)
    router = _make_attention_router(inputs, buffers, watch)
    tracker = _make_tracker(inputs, buffers, router)
    sampling = SamplingTable(
        len(buffers.tokens),
        model.full_vocab,
        buffers.device,
        watch_processors(inputs, watch),
        inputs.masks,
        parts.max_drafts,
        part_vocab=model.vocab,
    )
    program = Program(
        config=model,
        params=inputs.params,
        model=check_model(inputs),
        ops=watch_operations(inputs, watch, buffers.page_tables),
        row_tables=DeviceTables(buffers, sampling),
        attention=DecodeAttention(
            backend=router.decode,
            planning=parts.decode_capabilities.planning,
            layers=router.layers,
            max_seq_len=max_len,
            shares_prefixes=tracker is not None,
            shares_beside_prompts=tracker is not None,
            takes_bounds=parts.decode_capabilities.takes_bounds,
        ),
        # The memory plan counts scores of one position a row. Prompt log-probabilities score more,
        # which are therefore scored in parts.
        max_logits=count_scored_positions(inputs.config.max_running_requests, parts.max_drafts),
        verify_len=parts.max_drafts + 1,
        has_own_drafts=parts.has_own_drafts,
        rules=sampling.rules,
        verify_attention=_find_verify_attention(parts, router),
        prompt_attention=router.prefill
        if parts.prompt_capabilities.graph is GraphSupport.ALWAYS
        else None,
    )
    # Not the plugin's fault: the profile run reports it with the sizes to lower.
    out_of_memory = (torch.OutOfMemoryError,)
    options = (
        ()
        if parts.runner.options is None
        else (registry.make_options(parts.runner, inputs.config.opt),)
    )
    runner = inputs.hooks.wrap_runner(
        registry.make_part(parts.runner, Runner, program, *options, expected=out_of_memory), program
    )
    steps = StepMaker(
        buffers=buffers,
        sampling=sampling,
        pooling=PoolingTable(len(buffers.tokens), model.hidden, buffers.device),
        router=router,
        tracker=tracker,
    )
    executor = LocalExecutor(steps=steps, runner=runner, watch=watch)
    return AssembledExecutor(
        executor=executor, runner=runner, sampling=sampling, device=buffers.device, watch=watch
    )


def _find_verify_attention(parts: SelectedPlugins, router: PhaseRouter) -> AttentionBackend | None:
    """Find the backend of rows that verify drafts, if a graph may have its calls in it."""
    # Rows of several tokens go to the backend of prompts in steps without graphs too.
    capabilities = parts.prompt_capabilities
    is_capturable = (
        capabilities.graph >= GraphSupport.UNIFORM and capabilities.planning is Planning.NONE
    )
    return router.prefill if parts.max_drafts and is_capturable else None


def _make_tracker(
    inputs: BuildInputs, buffers: Buffers, router: PhaseRouter
) -> PrefixTracker | None:
    """What finds decode rows that share pages; None where none can, or the backend has no use.

    Graphs of grouped rows would be captured for nothing then.

    raises: PluginBroken
    """
    choice = inputs.parts.decode_capabilities
    # Beside states no backend was measured with groups of rows.
    # Drafts of the model's own layers come row by row in the order of the plan.
    can_share = (
        not inputs.parts.has_own_drafts
        and inputs.parts.cache.capabilities.reuse
        and not inputs.needs.contiguous
        and LayoutKind.STATE not in inputs.needs.layouts
    )
    if not can_share or Feature.SHARED_PREFIX not in choice.features:
        return None
    min_tokens: Any = router.decode.min_shared_tokens
    if min_tokens is None:
        return None
    if not isinstance(min_tokens, int) or min_tokens < 1:
        raise PluginBroken(
            f"the attention plugin {choice.names!r}: min_shared_tokens: expected a positive "
            f"int or None, got {min_tokens!r}; report it to its author"
        )
    rows, columns = buffers.page_tables[0].shape
    # The last row of the tables is padding.
    if (rows - 2) * columns * buffers.page_size < min_tokens:
        return None
    return PrefixTracker(
        inputs.model.kv_groups,
        rows=rows,
        columns=columns,
        page_size=buffers.page_size,
        min_tokens=min_tokens,
    )


def _make_attention_router(
    inputs: BuildInputs, buffers: Buffers, watch: DebugWatch | None
) -> PhaseRouter:
    """Make the attention backends, and the router that sends rows to them by phase.

    A backend that serves all phases is made once.

    raises: CannotRun
    """
    config, numbers = inputs.config, inputs.needs.token_groups
    layers = list_attention_layers(inputs.model, inputs.params)

    def make_part(choice: SelectedBackend) -> GroupPart:
        tables = tuple(numbers.index(group) for group in choice.groups)
        own = {
            index: evolve(layer, group=tables.index(layer.group))
            for index, layer in layers.items()
            if layer.group in tables
        }
        context = AttentionContext(
            query=inputs.needs.make_query(choice.phases, choice.groups),
            device=buffers.device,
            page_size=buffers.page_size,
            layers=own,
            pools={layer: buffers.pools[layer] for layer in own},
            kv={layer: buffers.kv[layer] for layer in own},
            options=registry.make_options(
                choice.spec,
                registry.leave_to_namesakes(choice.spec, config.opt, inputs.parts.specs),
            ),
        )
        made = make_attention_backend(choice.spec, context)
        backend = watch_attention(inputs, watch, made, choice.spec.name, context)
        return GroupPart(backend=backend, tables=tables, layers=own)

    made = [(choice.phases, make_part(choice)) for choice in inputs.parts.attention]
    prompts, decode = (
        [part for phases, part in made if phase in phases]
        for phase in (Phase.PREFILL, Phase.DECODE)
    )
    prefill = _join_parts(prompts)
    # NaN in what attention leaves unwritten shows in the logits, which are checked in every step.
    return PhaseRouter(
        prefill,
        # The same object tells runners that one backend attends for all rows.
        prefill if prompts == decode else _join_parts(decode),
        layers,
        config.debug_invariants,
    )


def _join_parts(parts: Sequence[GroupPart]) -> AttentionBackend:
    """One backend for all KV groups; that of the one part as it is."""
    return parts[0].backend if len(parts) == 1 else GroupedAttention(parts)


def list_attention_layers(model: ModelConfig, params: Params) -> Mapping[int, LayerInfo]:
    """List the layers that attention backends serve, by number.

    Groups are counted without those that keep a state: backends see neither their tables nor
    their pages.
    """
    groups = [
        number
        for number, group in enumerate(model.kv_groups)
        if group.layout.kind is not LayoutKind.STATE
    ]
    return {
        layer.index: LayerInfo(
            index=layer.index,
            group=groups.index(layer.group),
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            out_dim=_find_out_dim(model.kv_groups[layer.group].layout),
            sinks=None if layer.sinks is None else params[layer.sinks].tensor,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
        for layer in model.layers
        if layer.group in groups
    }


def _find_out_dim(layout: Layout) -> int | None:
    """How wide a head of the output is; None for as wide as one of the queries."""
    return layout.out_dim if isinstance(layout, LatentKV) else None


def make_attention_backend(spec: AttentionSpec, context: AttentionContext) -> AttentionBackend:
    """Make the backend of an attention plugin.

    raises: CannotRun, PluginBroken, torch.OutOfMemoryError
    """
    expected = (torch.OutOfMemoryError, ValueError, ImportError, OSError)
    try:
        backend: AttentionBackend = registry.make_part(
            spec, AttentionBackend, context, expected=expected
        )
    # The contract lets a backend refuse its options or the machine with ValueError.
    except ValueError as error:
        raise CannotRun(f"attn (--attn) {spec.name}: {shorten(error, 400)}") from error
    except (ImportError, OSError) as error:
        raise CannotRun(
            f"attn (--attn) {spec.name}: its kernels cannot be loaded: {describe_error(error)}; "
            f"install a build of them for torch {torch.__version__}, or name another backend"
        ) from error
    return backend
