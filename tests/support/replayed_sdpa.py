"""`sdpa` under graphs that compute again: each call plans its step anew, by what tensors hold now.

The operations `own-delta` say that they take delta rules, which lets graphs of prompts have them.
With the runner `rerun` whole models run replayed on a CPU, whose padding a GPU's graphs have too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
from attrs import define
from torch import Tensor

from headstock.builtin.specs import torch_ops
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    AttentionSpec,
    AttentionStep,
    Batch,
    GraphSupport,
    LayerConfig,
    LayerInfo,
    ModelConfig,
    OpsSpec,
    Stream,
)
from headstock_sdpa.backend import SdpaBackend, SdpaPlan
from headstock_sdpa.plugin import spec as sdpa

ENTRY_POINTS = """[headstock.attention]
sdpa-replayed = replayed_sdpa:spec
[headstock.ops]
own-delta = replayed_sdpa:own_delta
[headstock.runner]
rerun = rerun:spec
"""
RUNNER = "headstock-replayed:rerun"
"""With its distribution, since the toy plugins have a runner `rerun` too."""


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """The backend `sdpa-replayed` and the runner `rerun`, as long as the context lasts."""
    info = folder / "headstock_replayed-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: headstock-replayed\nVersion: 0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def spec() -> AttentionSpec:
    """`sdpa`, which a graph of any step may capture."""
    return attrs.evolve(
        sdpa(),
        name="sdpa-replayed",
        implementation="replayed_sdpa:ReplayedSdpa",
        capabilities=attrs.evolve(sdpa().capabilities, graph=GraphSupport.ALWAYS),
    )


def own_delta() -> OpsSpec:
    """torch's operations, of which the delta rule counts as the set's own."""
    return attrs.evolve(torch_ops(), name="own-delta", implementation="replayed_sdpa:OwnDeltaOps")


class OwnDeltaOps(TorchOps):
    """torch's operations with a delta rule of their own."""

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """The delta rule of any layer."""
        return operation == "delta_rule"

    def delta_rule(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `TorchOps`."""
        return super().delta_rule(x, layer, batch)


@define(eq=False)
class BoundPlan:
    """A plan of a graph: the step that it was last given."""

    step: AttentionStep


class ReplayedSdpa(SdpaBackend):
    """Reads lengths of captured steps from their tensors, which a CPU has at hand."""

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Nothing is allocated."""

    def graph_plan(self, bucket: int, step: AttentionStep) -> BoundPlan:
        """A plan of the step."""
        return BoundPlan(step)

    def graph_update(self, plan: BoundPlan, step: AttentionStep) -> None:
        """Another step for the plan."""
        plan.step = step

    def capture_plan(self, step: AttentionStep) -> BoundPlan:
        """A plan of the step."""
        return BoundPlan(step)

    def forward(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: SdpaPlan | BoundPlan,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """As `sdpa`; what pads the step is left alone."""
        if isinstance(plan, BoundPlan):
            step = without_padding(plan.step)
            count = int(step.query_start[-1])
            q, out, plan = q[:count], out[:count], self.plan(step)
        super().forward(q, layer, plan, out, lse)


def without_padding(step: AttentionStep) -> AttentionStep:
    """The step's rows that have tokens, with the lengths that its tensors hold."""
    lens = step.query_start.diff()
    used = lens > 0
    contexts = step.context_lens[used].numpy()
    assert (contexts <= step.host_context_lens[used.numpy()]).all()
    query_start = np.concatenate(([0], lens[used].cumsum(0).numpy())).astype(np.int32)
    return attrs.evolve(
        step,
        query_start=step.query_start.new_tensor(query_start.tolist()),
        context_lens=step.context_lens[used],
        page_tables=tuple(table[used] for table in step.page_tables),
        host_query_lens=lens[used].numpy(),
        host_context_lens=contexts,
    )
