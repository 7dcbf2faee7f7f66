"""TensorRT-LLM's kernels over the paged pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.attention.paged_plan import PagedPlan
from headstock.nn.attention.static_rows import StaticRows
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    DeviceEnv,
    FullKV,
    LayerInfo,
    Phase,
)
from headstock_trtllm import modules
from headstock_trtllm.kernels import Blackwell, Hopper, Kernels
from headstock_trtllm.plugin import BLACKWELL, HOPPER


class TrtllmBackend(AttentionBackend):
    """One kernel for prompts, one for decode; no planning on the host."""

    def __init__(self, context: AttentionContext, kernels: Kernels | None = None) -> None:
        """Compile missing kernels, allocate the workspaces and run each kernel once.

        raises: ValueError when the device has no kernels or they cannot be compiled
        """
        self.kernels: Kernels | None = kernels or load_kernels(context, _device_env(context.device))
        self.device = context.device
        self.page_size = context.page_size
        self.pools = dict(context.pools)
        self.static: StaticRows | None = None
        self.warm_up(context)

    def warm_up(self, context: AttentionContext) -> None:
        """Run one token of the dummy page through each kernel.

        This loads code, which is not allowed during a capture.
        """
        query = context.query
        group = query.groups[0]
        assert isinstance(group.layout, FullKV), group.layout
        shape = (1, group.heads, group.layout.k_dim)
        q = torch.zeros(shape, dtype=getattr(torch, group.q_dtype), device=self.device)
        layer = next(iter(context.layers.values()))
        rows = StaticRows.new(1, 1, self.page_size, self.device)
        plan = self.plan(rows.step(1, groups=layer.group + 1))
        for is_decode in {phase is Phase.DECODE for phase in query.phases}:
            self.forward(q, layer, evolve(plan, is_decode=is_decode), torch.empty_like(q))

    def plan(self, step: AttentionStep) -> PagedPlan:
        """The step's own tensors."""
        return PagedPlan.of(step)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: PagedPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim], dense
        """
        assert self.kernels is not None, "it is closed"
        attend = self.kernels.decode if plan.is_decode else self.kernels.prefill
        # Queries may be a view of the product of q, k and v, whose rows are longer; the kernels do
        # not support strides.
        attend(q.contiguous(), self.pools[layer.index], plan, layer, out)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Allocate buffers for the largest bucket, which the others share."""
        self.static = StaticRows.new(max(buckets), max_seq_len, self.page_size, self.device)

    def graph_plan(self, bucket: int, step: AttentionStep) -> PagedPlan:
        """A plan over the first `bucket` rows of the static buffers, holding the step."""
        assert self.static is not None, "graph_init comes first"
        plan = self.plan(self.static.step(bucket, len(step.page_tables)))
        self.graph_update(plan, step)
        return plan

    def graph_update(self, plan: PagedPlan, step: AttentionStep) -> None:
        """Write the step to the plan's buffers, at the same addresses."""
        assert self.static is not None, "graph_init comes first"
        self.static.write(plan.num_rows, step)

    def memory_bytes(self) -> int:
        """The workspaces and the static buffers of graphs."""
        owners = (self.kernels, self.static)
        return sum(owner.memory_bytes() for owner in owners if owner is not None)

    def close(self) -> None:
        """Release the pools, the buffers and the workspaces."""
        self.pools, self.static, self.kernels = {}, None, None


def load_kernels(context: AttentionContext, env: DeviceEnv) -> Kernels:
    """The kernels for a machine, compiled.   raises: ValueError when there are none"""
    if env in BLACKWELL:
        return Blackwell(context.device, context.query.max_seq_len)
    if env not in HOPPER:
        raise ValueError(
            f"TensorRT-LLM's kernels serve {HOPPER} and {BLACKWELL}, and this is {env}; set attn "
            "(--attn) to fi"
        )
    modules.ensure_compiled(modules.KernelNeed.of(context.query, context.page_size))
    return Hopper(context.device)


def _device_env(device: torch.device) -> DeviceEnv:
    """The properties of the device for `load_kernels`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return DeviceEnv(device=device.type, capability=capability)
