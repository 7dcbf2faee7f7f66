"""The answers of known faults, so that the error names the cause of a wrong answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from headstock.spi import LayerInfo
from headstock_conformance.attention.cases import AttentionCase

Pairing = Callable[[int, int], list[int]]
"""Maps each query head to its KV head, given the numbers of both."""


def pair_in_groups(heads: int, kv_heads: int) -> list[int]:
    """As in the contract: a KV head serves consecutive query heads."""
    return [head * kv_heads // heads for head in range(heads)]


def pair_in_turns(heads: int, kv_heads: int) -> list[int]:
    """KV heads in turns."""
    return [head % kv_heads for head in range(heads)]


def pair_backwards(heads: int, kv_heads: int) -> list[int]:
    """The last KV head first."""
    return pair_in_groups(heads, kv_heads)[::-1]


def pair_next(heads: int, kv_heads: int) -> list[int]:
    """Each query head with the KV head after its own."""
    return [(each + 1) % kv_heads for each in pair_in_groups(heads, kv_heads)]


def pair_first(heads: int, kv_heads: int) -> list[int]:
    """All query heads with the first KV head."""
    return [0] * heads


@frozen(kw_only=True)
class KnownFault:
    """A fault.

    ahead: how many tokens after its own a query sees; None for all
    is_past_end: whether it sees one after the row's last
    columns, slots, rows: how far the page-table column, the slot in its page and the row of the
        page table are off
    is_table_zeroed: whether all pages are the dummy page
    pair: which KV head a query head reads
    scale: what scores are multiplied by, given the layer's scale and the head dimension
    window: the window, given the layer's
    softcap: whether scores are bounded
    sinks: which of the layer's sinks there are
    sides: where keys and values are read in a page
    """

    name: str
    ahead: int | None = 0
    is_past_end: bool = False
    columns: int = 0
    slots: int = 0
    rows: int = 0
    is_table_zeroed: bool = False
    pair: Pairing = pair_in_groups
    scale: Callable[[float, int], float] = lambda scale, dim: scale
    window: Callable[[int], int | None] = lambda window: window
    softcap: bool = True
    sinks: Callable[[Tensor], Tensor | None] = lambda sinks: sinks
    sides: tuple[int, int] = field(default=(0, 1))


RIGHT = KnownFault(name="")

FAULTS = (
    KnownFault(name="queries see a later token", ahead=1),
    KnownFault(name="queries see a token behind the end of their row", ahead=1, is_past_end=True),
    KnownFault(name="queries see all tokens of their row, later ones too", ahead=None),
    KnownFault(name="queries do not see their own token", ahead=-1),
    KnownFault(name="query heads read the KV heads in turns, not in groups", pair=pair_in_turns),
    KnownFault(name="query heads read the KV heads in the opposite order", pair=pair_backwards),
    KnownFault(name="query heads read the KV head behind theirs", pair=pair_next),
    KnownFault(name="all query heads read the first KV head", pair=pair_first),
    KnownFault(name="the layer's scale is not used, but 1", scale=lambda scale, dim: 1.0),
    KnownFault(
        name="the layer's scale is not used, but one of the head dimension",
        scale=lambda scale, dim: dim**-0.5,
    ),
    KnownFault(name="the scale is applied twice", scale=lambda scale, dim: scale * scale),
    KnownFault(name="the scale is inverted", scale=lambda scale, dim: 1 / scale),
    KnownFault(
        name="scores are powers of 2 and not of e", scale=lambda scale, dim: scale * math.log(2)
    ),
    KnownFault(
        name="the scale has the change from powers of 2 to e twice",
        scale=lambda scale, dim: scale / math.log(2),
    ),
    KnownFault(name="the page table is read one column late", columns=1),
    KnownFault(name="the page table is read one column early", columns=-1),
    KnownFault(name="the page table of the next row is read", rows=1),
    KnownFault(name="the page table of the row before is read", rows=-1),
    KnownFault(
        name="every page is the dummy page, as if the page table held zeros", is_table_zeroed=True
    ),
    KnownFault(name="pages are read one slot late", slots=1),
    KnownFault(name="pages are read one slot early", slots=-1),
    KnownFault(name="keys are taken for values", sides=(0, 0)),
    KnownFault(name="values are taken for keys", sides=(1, 1)),
    KnownFault(name="keys and values are swapped", sides=(1, 0)),
    KnownFault(name="the window is ignored", window=lambda window: None),
    KnownFault(name="the window is one token too long", window=lambda window: window + 1),
    KnownFault(name="the window is one token too short", window=lambda window: max(window - 1, 0)),
    KnownFault(name="the softcap is ignored", softcap=False),
    KnownFault(name="the sinks are ignored", sinks=lambda sinks: None),
    KnownFault(name="all heads have the first head's sink", sinks=lambda s: s[:1].expand(len(s))),
)


def name_fault(
    attend_again: Callable[[], Tensor], case: AttentionCase, layer: LayerInfo, tolerance: float
) -> str:
    """The name of a known fault with the backend's output; empty if none.

    Noise first replaces NaN in the pool, so that reads of unowned slots differ by place.
    writes: the case's pool
    """
    if case.step.shared is not None:
        return ""
    noise = torch.randn(case.pool.shape, generator=torch.Generator().manual_seed(1))
    wide = torch.where(case.pool.isnan().cpu(), noise, case.pool.float().cpu())
    case.pool.copy_(wide)
    out = attend_again().float().cpu()
    host = evolve(case, pool=case.pool.cpu(), q=case.q.cpu())
    right = answer_with(RIGHT, host, layer)
    if matches(out, right, tolerance):
        return "slots that no row owns are read"
    for fault in FAULTS:
        answer = answer_with(fault, host, layer)
        if matches(out, answer, tolerance) and not matches(answer, right, tolerance):
            return fault.name
    if not bool(out.isfinite().all()):
        return "some of the output is never written"
    return ""


def matches(out: Tensor, answer: Tensor, tolerance: float) -> bool:
    """Whether the two are equal wherever the answer is defined."""
    defined = answer.isfinite()
    if int(defined.sum()) * 2 < answer.numel():
        return False
    close = torch.isclose(out, answer, atol=2 * tolerance, rtol=2 * tolerance)
    return bool(close[defined].all())


def answer_with(fault: KnownFault, case: AttentionCase, layer: LayerInfo) -> Tensor:
    """The attention that a backend with this fault gives for a case on the host, in float32."""
    parts = zip(
        torch.split(case.q, case.step.host_query_lens.tolist()), read_rows(fault, case), strict=True
    )
    return torch.cat([attend_row(fault, q, *row, layer) for q, row in parts]).float()


def read_rows(fault: KnownFault, case: AttentionCase) -> Iterator[tuple[Tensor, Tensor, int]]:
    """The keys and values of each row as the fault reads them, and the row's length.

    One token more than the row has, for queries that see a later one.
    """
    (*_, device_table) = case.step.page_tables
    table = device_table.cpu().roll(-fault.rows, 0)
    if fault.is_table_zeroed:
        table = torch.zeros_like(table)
    size = case.pool.shape[1] if case.pool.dim() == 3 else case.pool.shape[2]
    for row, length in enumerate(case.step.host_context_lens.tolist()):
        at = torch.arange(length + 1)
        columns = (at // size + fault.columns) % table.shape[1]
        pages, slots = table[row, columns].long(), (at + fault.slots) % size
        if case.pool.dim() == 3:
            keys = values = case.pool[pages, slots][:, None]
            values = values[..., : case.values[0].shape[-1]]
        else:
            keys, values = (case.pool[pages, side, slots] for side in fault.sides)
        yield keys.double(), values.double(), length


def attend_row(
    fault: KnownFault, q: Tensor, keys: Tensor, values: Tensor, length: int, layer: LayerInfo
) -> Tensor:
    """Attention of a row's last tokens; NaN for a query that sees nothing.

    q: [queries, heads, head_dim]    keys, values: [length + 1, kv_heads, head_dim]
    """
    pairs = fault.pair(q.shape[1], keys.shape[1])
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys[:, pairs])
    scores *= fault.scale(layer.scale, q.shape[-1])
    if layer.softcap and fault.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    own = torch.arange(length - len(q), length)[:, None]
    other = torch.arange(length + 1)
    seen = (other < length + fault.is_past_end).expand(len(q), -1)
    if fault.ahead is not None:
        seen = seen & (other <= own + fault.ahead)
    window = None if layer.window is None else fault.window(layer.window)
    if window is not None:
        seen = seen & (other > own - window)
    scores = scores.masked_fill(~seen, -math.inf)
    sinks = None if layer.sinks is None else fault.sinks(layer.sinks.to(q.device))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : length + 1]
    return torch.einsum("hqk,khd->qhd", weights, values[:, pairs])
