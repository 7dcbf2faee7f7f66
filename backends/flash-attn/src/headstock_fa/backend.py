"""FlashAttention over the paged pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.attention.device import count_processors
from headstock.nn.attention.merge import merge_prefixes as merge_in_torch
from headstock.nn.attention.sinks import scale_by_sinks
from headstock.nn.attention.static_rows import StaticRows
from headstock.spi import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    DeviceEnv,
    Feature,
    FullKV,
    LayerInfo,
    Phase,
    SharedPrefixes,
)
from headstock_fa import kernels
from headstock_fa.options import FlashOptions
from headstock_fa.providers import FA3_HINT, REQUIRE, Provider, choose_provider, installed_versions
from headstock_fa.step import (
    FlashPlan,
    SharedPlan,
    choose_num_splits,
    choose_prefix_splits,
    choose_prompt_splits,
    count_worthwhile_tokens,
)
from headstock_fa.triton_decode import TritonDecode, load_triton_decode

EIGHT_BIT = "float8_e4m3fn"
FEW_QUERIES = 16
"""Queries of a row below which a step in a graph is planned like a decode step."""


class FlashAttentionBackend(AttentionBackend):
    """One kernel for every phase: ragged queries over pages.

    Only the static buffers of graphs outlive a step.
    """

    def __init__(self, context: AttentionContext, provider: Provider | None = None) -> None:
        """Load `provider`, by default the first one that serves the device.

        raises: ValueError when none does, or it lacks a feature that the options require
        """
        provider = provider or find_provider(context.device)
        if context.options.shared_prefix == "on" and Feature.SHARED_PREFIX not in provider.features:
            raise ValueError(
                "fa.shared_prefix=on needs a FlashAttention-3, and "
                f"{provider.require.distribution} has FlashAttention-{provider.generation}; leave "
                f"the option at auto, or install on Hopper: {FA3_HINT}"
            )
        self.kernel: kernels.Kernel = getattr(kernels, provider.loader)()
        self.device = context.device
        self.page_size = context.page_size
        # The library takes keys and values as two tensors. These are views of the pool: nothing is
        # copied.
        self.keys = {layer: pool[:, 0] for layer, pool in context.pools.items()}
        self.values = {layer: pool[:, 1] for layer, pool in context.pools.items()}
        # One shape for all groups: the spec claims no mixed ones.
        self.group = context.query.groups[0]
        assert isinstance(self.group.layout, FullKV), self.group.layout
        self.kv_heads = self.group.layout.kv_heads
        self.out_width = self.group.heads * self.group.layout.v_dim
        self.eight_bit = self.group.kv_dtype == EIGHT_BIT
        self.options: FlashOptions = context.options
        self.processors = count_processors(context.device)
        self.triton_decode: TritonDecode | None = load_triton_decode(context)
        self.static: StaticRows | None = None
        self.merge = _load_merge(context.device)
        # For graphs only: see `attend_shared`.
        self.side: torch.cuda.Stream | None = None

    def plan(self, step: AttentionStep) -> FlashPlan:
        """The step's own tensors."""
        # For prompts the library chooses the number. It bounds it as if the longest row were the
        # only one; one split for steps with many tokens was not tested.
        if step.phase is not Phase.DECODE:
            return FlashPlan.of(step, num_splits=0)
        return FlashPlan.of(
            step,
            num_splits=self.num_splits_for(step.num_rows),
            shared=None if step.shared is None else self.plan_shared(step.shared),
        )

    def plan_shared(self, shared: SharedPrefixes) -> SharedPlan:
        """Both parts of a step; the groups' queries see all shared tokens of their rows."""
        splits = choose_prefix_splits(self.kv_heads, self.processors)
        return SharedPlan(
            prefixes=FlashPlan.of(
                shared.prefixes,
                num_splits=splits,
                is_causal=False,
                rest_lens=shared.rest.context_lens,
            ),
            rest=self.capture_plan(shared.rest),
            shared_lens=shared.shared_lens,
        )

    def num_splits_for(self, rows: int) -> int:
        """The number of parts in which a decode step of `rows` rows reads its keys."""
        return self.options.num_splits or choose_num_splits(rows, self.kv_heads, self.processors)

    @property
    def min_shared_tokens(self) -> int | None:
        """By the option `shared_prefix`."""
        if self.options.shared_prefix == "off":
            return None
        if self.options.shared_prefix == "on":
            return 1
        return count_worthwhile_tokens(self.group)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: FlashPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim]; lse [tokens, heads] float32, natural logarithm,
            without sinks
        """
        if self.eight_bit:
            # Scores are linear in the keys and results in the values, so a layer's two scales are
            # applied to the scale of scores and to the result.
            q, layer = _quantize_queries(q), evolve(layer, scale=layer.scale * layer.k_scale)
        if plan.shared is not None and layer.window is None:
            sums: Tensor | None = self.attend_shared(q, layer, plan.shared, out, lse)
        else:
            needs_lse = lse is not None or layer.sinks is not None
            sums = self.attend(q, layer, plan, out, lse, needs_lse=needs_lse)
        if layer.sinks is not None:
            assert sums is not None, "kernels give what is needed"
            # After both parts of a step, each of which would have the sinks otherwise.
            scale_by_sinks(out, sums, layer.sinks, plan.query_start)
        if self.eight_bit and layer.v_scale != 1.0:
            out.mul_(layer.v_scale)

    def attend(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: FlashPlan,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        needs_lse: bool,
    ) -> Tensor | None:
        """Call this plugin's kernel if it serves the plan, else the library's.

        returns: LSE [tokens, heads] if needed, `lse` where that is given, or None
        writes: out, lse
        """
        keys, values = self.keys[layer.index], self.values[layer.index]
        own = self.triton_decode
        if own is not None and own.serves(plan):
            if needs_lse and lse is None:
                lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            own.attend(q, keys, values, plan, layer, out, lse)
            return lse
        sums = self.kernel(q, keys, values, plan, layer, out, needs_lse)
        return sums if lse is None or sums is None else lse.copy_(sums)

    def attend_shared(
        self, q: Tensor, layer: LayerInfo, plan: SharedPlan, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        """Attend to shared prefixes once per group, to the rest row by row, and merge the two.

        Rows of groups have one token each and come first; later rows only have a rest.

        returns: LSE [tokens, heads], `lse` where that is given
        writes: out, lse as `forward`, without sinks
        """
        # A step may have more rows than tokens: rows without tokens come last.
        shared_lens = plan.shared_lens[: len(q)]
        rows = len(shared_lens)
        prefix_out = torch.empty_like(out[:rows])
        # In parallel in a graph: prefixes are compute-bound, the rest is memory-bound. This cut a
        # layer of 128 rows of 512 shared tokens from 62 us to 54. With separate launches, the host
        # takes longer than the device.
        with self.branch() as join:
            prefix_lse = self.attend(q[:rows], layer, plan.prefixes, prefix_out, needs_lse=True)
        rest_lse = self.attend(q, layer, plan.rest, out, lse, needs_lse=True)
        join()
        assert prefix_lse is not None and rest_lse is not None, "kernels give what is needed"
        self.merge(out[:rows], rest_lse[:rows], prefix_out, prefix_lse, shared_lens)
        return rest_lse

    @contextmanager
    def branch(self) -> Iterator[Callable[[], None]]:
        """While a graph is captured, put the following work on a separate branch.

        yields: the function that makes the current stream wait for the branch
        """
        side = self.side
        if side is None or not torch.cuda.is_current_stream_capturing():
            yield lambda: None
            return
        current = torch.cuda.current_stream()
        # The next branch begins after the current stream's reads of this one, so memory that the
        # library allocates here may be reused there.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield lambda: current.wait_stream(side)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Allocate buffers for the largest bucket, which the others share."""
        if self.device.type == "cuda":
            # Prefixes begin first: each of their programs needs a whole processor, and would
            # otherwise wait for the rest of the rows.
            self.side = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self.device, priority=-1
            )
        self.static = StaticRows.new(max(buckets), max_seq_len, self.page_size, self.device)

    def graph_plan(self, bucket: int, step: AttentionStep) -> FlashPlan:
        """A plan over the first `bucket` rows of the static buffers, holding the step."""
        assert self.static is not None, "graph_init comes first"
        plan = self.plan(self.static.step(bucket, len(step.page_tables)))
        self.graph_update(plan, step)
        return plan

    def graph_update(self, plan: FlashPlan, step: AttentionStep) -> None:
        """Write the step to the plan's buffers, at the same addresses."""
        assert self.static is not None, "graph_init comes first"
        self.static.write(plan.num_rows, step)
        plan.update_schedules()

    def capture_plan(self, step: AttentionStep) -> FlashPlan:
        """The step's own tensors; the library chooses no number of parts."""
        if step.phase is Phase.DECODE:
            return self.plan(step)
        shared = None if step.shared is None else self.plan_shared(step.shared)
        # Rows that verify drafts are decode rows with a few more queries, served by the same
        # blocks. Not measured.
        if step.max_query_len < FEW_QUERIES:
            splits = self.num_splits_for(step.num_rows)
        else:
            splits = self.options.num_splits or choose_prompt_splits(step, self.out_width)
        return FlashPlan.of(step, num_splits=splits, shared=shared)

    def memory_bytes(self) -> int:
        """The static buffers of graphs, and the partial results to merge."""
        parts = 0 if self.triton_decode is None else self.triton_decode.memory_bytes()
        return parts + (0 if self.static is None else self.static.memory_bytes())

    def close(self) -> None:
        """Forget the pools and the buffers."""
        self.keys, self.values = {}, {}
        self.static = self.side = self.triton_decode = None


def _load_merge(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """The merge of shared prefixes: one kernel if Triton is installed, else torch operations."""
    if device.type != "cuda" or find_spec("triton") is None:
        return merge_in_torch
    # Imported late: without a GPU, Triton may be missing.
    from headstock_fa.merge import merge_prefixes

    return merge_prefixes


def _quantize_queries(q: Tensor) -> Tensor:
    """The queries in the 8-bit type of the KV, as the library requires; large ones saturate."""
    most = torch.finfo(torch.float8_e4m3fn).max
    # The conversion itself does not saturate.
    return q.clamp(-most, most).to(torch.float8_e4m3fn)


def find_provider(device: torch.device) -> Provider:
    """The provider for a device.

    raises: ValueError with the reason and a fix if there is none
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    provider, rejections = choose_provider(
        DeviceEnv(device=device.type, capability=capability, distributions=installed_versions())
    )
    if provider is None:
        raise ValueError(
            f"no FlashAttention serves here: {'; '.join(rejections)}; {REQUIRE.hint}, or set "
            "attn (--attn) to fi"
        )
    return provider
