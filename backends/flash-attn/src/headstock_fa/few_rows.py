"""Decode steps of a few rows by this plugin's own kernel, where it is measured to be faster."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.attention.device import count_processors
from headstock.spi import AttentionContext, FullKV, LayerInfo
from headstock_fa.step import FlashPlan

if TYPE_CHECKING:
    from headstock_fa.split_kernel import PartialSums, SplitTile

MEASURED_ROWS = 8
"""What `auto` means, where the kernel was measured: GPUs from Hopper on."""
MEASURED_CAPABILITY = (9, 0)
MEASURED_GROUP = 2
"""Query heads of a KV head up to which it was faster at every length, up to 32,768 tokens.

With 8 of them one row of 4,096 tokens took 20 us for FlashAttention-3's 14, of 640 tokens 8 for 11.
"""
MOST_SPLITS = 32
MOST_GROUP = 64
"""Query heads of a KV head that a program has registers for."""


@frozen(kw_only=True, eq=False)
class FewRows:
    """The kernel of `split_kernel` for decode steps of up to `rows` rows, and what it keeps.

    pdl: whether launches overlap, which GPUs from Hopper on can do
    """

    rows: int
    kv_heads: int
    processors: int
    tile: SplitTile
    parts: PartialSums
    pdl: bool

    def serves(self, plan: FlashPlan, layer: LayerInfo) -> bool:
        """Whether the plan is a decode step of few enough rows that share no pages here."""
        is_shared = plan.shared is not None and layer.window is None
        return (
            plan.is_decode
            and plan.max_query_len == 1
            and plan.num_rows <= self.rows
            and not is_shared
        )

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: FlashPlan,
        layer: LayerInfo,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See `split_kernel.attend_few_rows`.   writes: out, lse"""
        from headstock_fa.split_kernel import attend_few_rows

        attend_few_rows(
            q,
            keys,
            values,
            plan.context_lens,
            plan.page_tables[layer.group],
            layer,
            out,
            lse,
            self.parts,
            splits=choose_splits(plan.num_rows, self.kv_heads, self.processors),
            pdl=self.pdl,
            tile=self.tile,
        )

    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return self.parts.memory_bytes()


def choose_splits(rows: int, kv_heads: int, processors: int) -> int:
    """In how many parts at most to read a row's keys: a power of two.

    Two programs a processor, by the number of rows alone, so that a graph stays valid as rows grow.
    """
    share = max(2 * processors // (rows * kv_heads), 1)
    return min(MOST_SPLITS, 1 << (share.bit_length() - 1))


def load_few_rows(context: AttentionContext) -> FewRows | None:
    """The kernel for as many rows as the option says; None where FlashAttention serves all steps.

    raises: ValueError with the reason, where the option names a number and the kernel cannot serve
    """
    wanted = context.options.few_rows
    if wanted == "off":
        return None
    reason = _find_obstacle(context, is_measured=wanted == "auto")
    if reason is not None:
        if wanted == "auto":
            return None
        raise ValueError(
            f"fa.few_rows={wanted} cannot serve: {reason}; use --opt fa.few_rows=auto, which "
            "leaves such steps to FlashAttention"
        )
    return make_few_rows(MEASURED_ROWS if wanted == "auto" else wanted, context)


def make_few_rows(rows: int, context: AttentionContext) -> FewRows:
    """The kernel for up to so many rows, with room for its partial sums."""
    from headstock_fa.split_kernel import PartialSums, choose_tile

    device, (heads, kv_heads, head_dim) = context.device, _find_shape(context)
    processors = count_processors(device)
    counts = range(1, rows + 1)
    return FewRows(
        rows=rows,
        kv_heads=kv_heads,
        processors=processors,
        tile=choose_tile(head_dim),
        parts=PartialSums.new(
            rows=rows,
            parts=max(count * choose_splits(count, kv_heads, processors) for count in counts),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            device=device,
        ),
        pdl=_capability(device) >= MEASURED_CAPABILITY,
    )


def _find_obstacle(context: AttentionContext, *, is_measured: bool) -> str | None:
    """Why the kernel cannot serve here; with `is_measured`, also where it was never measured."""
    # One shape and type for all groups: the spec claims no mixed ones.
    asked = context.query.groups[0]
    heads, kv_heads, _ = _find_shape(context)
    if find_spec("triton") is None:
        return "Triton is not installed"
    if context.device.type != "cuda":
        return f"it needs a GPU, and this is {context.device.type}"
    if is_measured and _capability(context.device) < MEASURED_CAPABILITY:
        return "it was measured on GPUs from Hopper on alone"
    if asked.kv_dtype != asked.q_dtype:
        return f"it reads keys of 16 bits, not {asked.kv_dtype}"
    group, most = heads // kv_heads, MEASURED_GROUP if is_measured else MOST_GROUP
    if group > most:
        return f"{group} query heads share a KV head; it takes up to {most}"
    return None


def _find_shape(context: AttentionContext) -> tuple[int, int, int]:
    """Query heads, KV heads and numbers of a head."""
    asked = context.query.groups[0]
    assert isinstance(asked.layout, FullKV), asked.layout
    return asked.heads, asked.layout.kv_heads, asked.layout.k_dim


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) of what is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
