"""A small model over tables of its own, and a runner that computes its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock import registry
from headstock.errors import CannotRun
from headstock.execution.attention_router import PhaseRouter
from headstock.execution.buffers import Buffers, BufferShape, allocate_buffers
from headstock.execution.executor import LocalExecutor
from headstock.execution.pooling import PoolingTable
from headstock.execution.prefix_tracker import PrefixTracker
from headstock.execution.row_tables import DeviceTables
from headstock.execution.sampling_inputs import SamplingTable
from headstock.execution.step import StepMaker
from headstock.execution.token_masks import MaskSource
from headstock.nn.decoder import forward
from headstock.nn.draft_layers import forward_drafts
from headstock.nn.eager_step import run_eager_step
from headstock.ops.bound import BoundOps
from headstock.selection.refusals import check_resolve
from headstock.spi import (
    AttentionContext,
    AttentionQuery,
    DecodeAttention,
    DeviceEnv,
    GraphSupport,
    KVLayer,
    LayoutKind,
    LogitsProcessor,
    Model,
    ModelConfig,
    OpsSpec,
    Params,
    PartQuery,
    Phase,
    Planning,
    Program,
    Runner,
    RunnerSpec,
    Sample,
    Step,
)
from headstock.startup.assemble import list_attention_layers
from headstock_conformance.ops.checks import Subject as OpsSubject
from headstock_conformance.ops.models import (
    draw_weights,
    make_plain,
)
from headstock_conformance.runner.paged_attention import PagedAttention

MAX_ROWS = 20
MAX_SEQ_LEN = 48
PAGE_SIZE = 4
MAX_LOGITS = 23
"""Positions that are scored at once: fewer than a long prompt has."""
VERIFY_LEN = 4
WINDOW = 9
EMBEDDING_SCALE = 10.0
"""So large that greedy rows go on differing: with less, most soon repeat the same token."""


@frozen(kw_only=True)
class Subject:
    """A runner plugin, and where it runs."""

    spec: RunnerSpec
    env: DeviceEnv
    opt: Sequence[str] = ()

    def make_runner(self, program: Program) -> Runner:
        """The runner as the engine makes it.   raises: CannotRun, PluginBroken"""
        has_options = self.spec.options is not None
        options = (registry.make_options(self.spec, self.opt),) if has_options else ()
        runner: Runner = registry.make_part(self.spec, Runner, program, *options)
        return runner


class EagerReference(Runner):
    """What every step is compared with: operation by operation, and never a replay."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, step: Step) -> Sample:
        """What the step's scored tokens sample.   writes: the pools, the token table"""
        return run_eager_step(self.program, step)

    def close(self) -> None:
        """Nothing is captured."""


@frozen(kw_only=True, eq=False)
class ToyModel:
    """A model with random parameters, that both the runner and the reference compute.

    saved: copies of the parameters
    """

    config: ModelConfig
    model: Model
    ops: BoundOps
    params: Params
    saved: Mapping[str, Tensor]

    @classmethod
    def make(cls, subject: Subject, config: ModelConfig) -> ToyModel:
        """A model of that configuration, over operations that the runner takes.

        raises: CannotRun where the runner does not take it; PluginBroken
        """
        claims = subject.spec.capabilities
        config = evolve(config, embedding_scale=EMBEDDING_SCALE, tied_embeddings=False)
        kinds = {group.layout.kind for group in config.kv_groups}
        if claims.models is not None:
            raise CannotRun(
                f"it runs {' and '.join(sorted(claims.models)) or 'nothing'} alone, and the kit "
                "has a decoder of its own; compare an engine with --runner eager"
            )
        if not kinds <= claims.layouts:
            names = ", ".join(sorted(kind.value for kind in kinds - claims.layouts))
            raise CannotRun(f"the case has a model with {names} KV, which it does not claim")
        name = (
            "torch" if claims.ops is None or "torch" in claims.ops else min(claims.ops, default="")
        )
        ops_spec: OpsSpec = registry.load_spec("ops", name)
        ops = OpsSubject(spec=ops_spec, env=subject.env).make(config, "float32")
        query = PartQuery(
            model=config,
            dtype="float32",
            kv_dtype="float32",
            formats=(),
            contiguous=False,
            max_rows=MAX_ROWS,
            max_batch_tokens=MAX_ROWS * MAX_SEQ_LEN,
            max_seq_len=MAX_SEQ_LEN,
            parts={"ops": name},
        )
        check_resolve(subject.spec, "--runner", query, subject.env)
        weights = draw_weights(config, torch.float32, subject.env.device)
        params, bound = weights.prepare(ops), BoundOps(name, ops, config)
        bound.bind(params, config)
        return cls(
            config=config,
            model=Model(
                config=lambda hf: config,
                params=lambda config: weights.specs,
                forward=forward,
                draft=forward_drafts if config.draft_layers else None,
            ),
            ops=bound,
            params=params,
            saved={name: weight.tensor.clone() for name, weight in params.items()},
        )


@frozen(kw_only=True)
class Setup:
    """How an engine is put together.

    max_rows, max_seq_len: of its tables
    graph, planning: of attention
    verify_len, has_own_drafts: as in `Program`
    shares_prefixes: rows are looked at for pages that they share
    processors, masks: what a `kind` may name beside settings
    """

    max_rows: int = MAX_ROWS
    max_seq_len: int = MAX_SEQ_LEN
    graph: GraphSupport = GraphSupport.ALWAYS
    planning: Planning = Planning.NONE
    verify_len: int = 1
    has_own_drafts: bool = False
    shares_prefixes: bool = False
    processors: Mapping[str, LogitsProcessor] = MappingProxyType({})
    masks: MaskSource | None = None


@frozen(kw_only=True, eq=False)
class Rig:
    """Tables, a program over them, and a runner of it that an executor drives."""

    buffers: Buffers
    program: Program
    runner: Runner
    executor: LocalExecutor

    @classmethod
    def make(
        cls,
        toy: ToyModel,
        device: torch.device,
        setup: Setup,
        make_runner: Callable[[Program], Runner],
    ) -> Rig:
        """A rig whose free pages hold NaN, and whose token table holds what nobody wrote."""
        config = toy.config
        shape = BufferShape(
            groups=config.kv_groups,
            device=device,
            kv_dtype=torch.float32,
            page_size=PAGE_SIZE,
            rows=setup.max_rows,
        )
        columns = -(-setup.max_seq_len // PAGE_SIZE)
        # A state is one page.
        pages = [
            (1 if group.layout.kind is LayoutKind.STATE else columns) * setup.max_rows
            for group in config.kv_groups
        ]
        buffers = allocate_buffers(shape, pages, setup.max_seq_len)
        for part in list_parts(buffers):
            part[1:].fill_(torch.nan)
        stale = np.random.default_rng(7).integers(0, config.vocab, buffers.tokens[:-1].shape)
        buffers.tokens[:-1].copy_(torch.from_numpy(stale))
        tracker = None
        if setup.shares_prefixes:
            tracker = PrefixTracker(
                config.kv_groups,
                rows=setup.max_rows + 1,
                columns=columns,
                page_size=PAGE_SIZE,
                min_tokens=1,
            )
        sampling = SamplingTable(
            setup.max_rows + 1,
            config.vocab,
            device,
            setup.processors,
            setup.masks,
            setup.verify_len - 1,
        )
        router = make_router(toy, buffers, setup)
        can_capture = setup.planning is Planning.NONE
        program = Program(
            config=config,
            params=toy.params,
            model=toy.model,
            ops=toy.ops,
            row_tables=DeviceTables(buffers, sampling),
            attention=DecodeAttention(
                backend=router.decode,
                planning=setup.planning,
                layers=router.layers,
                max_seq_len=setup.max_seq_len,
                shares_prefixes=setup.shares_prefixes,
                shares_beside_prompts=setup.shares_prefixes,
                # It reads lengths on the device alone.
                takes_bounds=can_capture,
            ),
            max_logits=MAX_LOGITS,
            prompt_attention=router.prefill if setup.graph is GraphSupport.ALWAYS else None,
            verify_len=setup.verify_len,
            verify_attention=router.prefill if can_capture and setup.verify_len > 1 else None,
            has_own_drafts=setup.has_own_drafts,
            rules=sampling.rules,
        )
        steps = StepMaker(
            buffers=buffers,
            sampling=sampling,
            pooling=PoolingTable(setup.max_rows + 1, config.hidden, device),
            router=router,
            tracker=tracker,
        )
        runner = make_runner(program)
        return cls(
            buffers=buffers,
            program=program,
            runner=runner,
            executor=LocalExecutor(steps=steps, runner=runner),
        )


def make_windowed() -> ModelConfig:
    """A plain decoder whose middle layer sees the latest tokens alone, in a KV group of its own."""
    plain = make_plain()
    (group,) = plain.kv_groups
    first, middle, last = plain.layers
    return evolve(
        plain,
        layers=(first, evolve(middle, group=1, window=WINDOW), last),
        kv_groups=(
            evolve(group, layers=(0, 2)),
            evolve(group, layers=(1,), window=WINDOW),
        ),
    )


def make_drafting() -> ModelConfig:
    """A plain decoder whose last layer only guesses, with a KV group of its own."""
    plain = make_plain()
    (group,) = plain.kv_groups
    *own, last = plain.layers
    return evolve(
        plain,
        layers=(*own, evolve(last, group=1)),
        kv_groups=(evolve(group, layers=(0, 1)), evolve(group, layers=(2,))),
        draft_layers=1,
    )


def make_router(toy: ToyModel, buffers: Buffers, setup: Setup) -> PhaseRouter:
    """Attention of the toy model over these buffers; what it leaves unwritten is NaN."""
    layers = list_attention_layers(toy.config, toy.params)
    # The backend is the kit's own, and asks nothing of the query but what it has.
    query = AttentionQuery(
        phases=frozenset(Phase),
        groups=(),
        page_size=PAGE_SIZE,
        contiguous=False,
        max_rows=setup.max_rows,
        max_seq_len=setup.max_seq_len,
    )
    context = AttentionContext(
        query=query,
        device=buffers.device,
        page_size=PAGE_SIZE,
        layers=layers,
        pools={index: buffers.pools[index] for index in layers},
        kv={index: buffers.kv[index] for index in layers},
        options=None,
    )
    backend = PagedAttention(context)
    return PhaseRouter(backend, backend, layers, check=True)


def list_parts(buffers: Buffers) -> list[Tensor]:
    """All parts of all layers' pages, each [pages, ...]."""
    return [part for layer in buffers.kv for part in split_layer(layer)]


def split_layer(layer: KVLayer) -> list[Tensor]:
    """The parts of a layer's pages, each [pages, ...]."""
    parts = [layer.k, layer.v, layer.latent, *layer.state.values()]
    return [part for part in parts if part is not None]
