"""Decode steps by this plugin's own kernel, where it was measured to be faster."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.attention.device import count_processors
from headstock.spi import AttentionContext, FullKV, LayerInfo
from headstock_fa.decode_tile import DecodeTile, choose_tile
from headstock_fa.step import FlashPlan

if TYPE_CHECKING:
    from headstock_fa.decode_kernel import PartialSums

MEASURED_ROWS = 256
"""Rows of `auto` where the kernel was measured: GPUs from Hopper on."""
MEASURED_CAPABILITY = (9, 0)
MEASURED_GROUP = 8
"""Query heads per KV head up to which it was measured."""
ALWAYS_FASTER_GROUP = 2
"""Query heads per KV head up to which it is faster at any number of rows."""
FASTER_PROGRAMS = 64
"""Rows times KV heads from which it is faster with more query heads.

One stream of the 8B shape, with four, reaches 231 tokens a second with it and 241 with
FlashAttention-3; 30B-A3B, with eight, 362 and 383. Eight streams of 8B reach 1,532 and 1,489.
"""
MOST_GROUP = 64
"""Maximum query heads per KV head for the registers of a program."""


@frozen(kw_only=True, eq=False)
class TritonDecode:
    """The kernel of `decode_kernel` for decode steps in a range of rows, and its buffers.

    least_rows, rows: minimum and maximum number of rows
    tiles: by number of rows
    pdl: whether launches overlap, on GPUs from Hopper on
    """

    least_rows: int
    rows: int
    tiles: tuple[DecodeTile, ...]
    parts: PartialSums
    pdl: bool

    def serves(self, plan: FlashPlan) -> bool:
        """Whether the plan has one query per row, over the whole row, for a number of rows in
        range."""
        return (
            plan.is_decode
            and plan.is_causal
            and plan.max_query_len == 1
            and self.least_rows <= plan.num_rows <= self.rows
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
        """See `decode_kernel.attend_decode_rows`.   writes: out, lse"""
        from headstock_fa.decode_kernel import attend_decode_rows

        attend_decode_rows(
            q,
            keys,
            values,
            plan.context_lens,
            plan.page_tables[layer.group],
            layer,
            out,
            lse,
            self.parts,
            tile=self.tiles[plan.num_rows],
            pdl=self.pdl,
        )

    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return self.parts.memory_bytes()


def load_triton_decode(context: AttentionContext) -> TritonDecode | None:
    """The kernel for the rows of the option; None if FlashAttention serves all steps.

    raises: ValueError with the reason, if the option is a number and the kernel cannot serve
    """
    rows = context.options.triton_rows
    if rows == "off":
        return None
    reason = _find_obstacle(context, is_measured=rows == "auto")
    if reason is not None:
        if rows == "auto":
            return None
        raise ValueError(
            f"fa.triton_rows={rows} cannot serve: {reason}; set opt (--opt) to "
            "fa.triton_rows=auto, which leaves such steps to FlashAttention"
        )
    if rows != "auto":
        return make_triton_decode(rows, context)
    heads, kv_heads, _ = _find_shape(context)
    is_faster = heads // kv_heads <= ALWAYS_FASTER_GROUP
    least_rows = 1 if is_faster else -(-FASTER_PROGRAMS // kv_heads)
    return make_triton_decode(MEASURED_ROWS, context, least_rows=least_rows)


def make_triton_decode(
    rows: int, context: AttentionContext, *, least_rows: int = 1
) -> TritonDecode:
    """The kernel for up to `rows` rows, with room for its partial sums."""
    from headstock_fa.decode_kernel import PartialSums

    device, (heads, kv_heads, head_dim) = context.device, _find_shape(context)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    processors = count_processors(device)
    tiles = [
        choose_tile(max(count, 1), **shape, processors=processors) for count in range(rows + 1)
    ]
    return TritonDecode(
        least_rows=least_rows,
        rows=rows,
        tiles=tuple(tiles),
        parts=PartialSums.new(
            rows=rows,
            parts=max(count * tile.splits for count, tile in enumerate(tiles)),
            **shape,
            device=device,
        ),
        pdl=_capability(device) >= MEASURED_CAPABILITY,
    )


def _find_obstacle(context: AttentionContext, *, is_measured: bool) -> str | None:
    """Why the kernel cannot serve here; with `is_measured`, also if it was never measured here."""
    # One shape and type for all groups: the spec claims no mixed ones.
    asked = context.query.groups[0]
    heads, kv_heads, _ = _find_shape(context)
    if find_spec("triton") is None:
        return "Triton is not installed"
    if context.device.type != "cuda":
        return f"it needs a GPU, and this is {context.device.type}"
    if is_measured and _capability(context.device) < MEASURED_CAPABILITY:
        return "it was only measured on GPUs from Hopper on"
    if asked.kv_dtype != asked.q_dtype:
        return f"it reads keys of 16 bits, not {asked.kv_dtype}"
    group, most = heads // kv_heads, MEASURED_GROUP if is_measured else MOST_GROUP
    if group > most:
        return f"{group} query heads share a KV head; it takes up to {most}"
    return None


def _find_shape(context: AttentionContext) -> tuple[int, int, int]:
    """Query heads, KV heads and head size."""
    group = context.query.groups[0]
    assert isinstance(group.layout, FullKV), group.layout
    return group.heads, group.layout.kv_heads, group.layout.k_dim


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) if the device is not a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
