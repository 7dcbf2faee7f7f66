"""How pages of each layout lie in memory, and what a step finds of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attrs import evolve

from headstock.debug.canary import Canary
from headstock.errors import EngineDied
from headstock.execution.buffers import Buffers, BufferShape, allocate_buffers
from headstock.execution.kv_pools import count_page_bytes
from headstock.execution.row_tables import make_attention_step, make_batch
from headstock.spi import (
    FullKV,
    KVGroup,
    LatentKV,
    LayerConfig,
    LayerInfo,
    ModelConfig,
    Phase,
    RowColumns,
    StateKV,
    StateTensor,
)
from headstock.startup.assemble import list_attention_layers

NARROW = FullKV(kv_heads=2, k_dim=4, v_dim=4)
STATE = StateKV(tensors=(StateTensor("conv", (3, 5)), StateTensor("sum", (7,), "float32")))
GROUPS = (
    KVGroup(layers=(0, 3), layout=NARROW),
    KVGroup(layers=(1,), layout=FullKV(kv_heads=2, k_dim=6, v_dim=3), dtype="float16"),
    KVGroup(layers=(2,), layout=LatentKV(dim=10, rope_dim=4)),
    KVGroup(layers=(4,), layout=STATE),
)
TYPES = {"kv_dtype": torch.float32, "dtype": torch.bfloat16}
COUNTS = (9, 6, 4, 2)
MODEL = ModelConfig(
    architecture="pools",
    vocab=8,
    hidden=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    intermediate=8,
    norm_eps=1e-6,
    max_position=12,
    ropes=(),
    layers=(),
    kv_groups=(),
)


def make_buffers(groups: tuple[KVGroup, ...] = GROUPS) -> Buffers:
    """Buffers of four groups with counts of their own, for three rows of up to 12 tokens."""
    shape = BufferShape(groups=groups, page_size=4, rows=3, **TYPES, device=torch.device("cpu"))
    return allocate_buffers(shape, COUNTS, 12)


def test_the_memory_plan_counts_the_bytes_that_are_allocated() -> None:
    pools = make_buffers().pools

    for group, count in zip(GROUPS, COUNTS, strict=True):
        for layer in group.layers:
            assert len(pools[layer]) == count + 1
            assert pools[layer][0].nbytes == count_page_bytes(group, 4, **TYPES)


def test_the_parts_of_a_page_are_views_that_do_not_overlap() -> None:
    buffers = make_buffers()
    full, apart, latent, _, state = buffers.kv

    assert full.k is not None and full.v is not None
    assert torch.equal(torch.stack((full.k, full.v), 1), buffers.pools[0])
    full.k.fill_(1), full.v.fill_(2)
    assert (buffers.pools[0][:, 0] == 1).all() and (buffers.pools[0][:, 1] == 2).all()
    assert apart.k is not None and apart.v is not None and apart.k.dtype is torch.float16
    assert (apart.k.shape, apart.v.shape) == ((7, 4, 2, 6), (7, 4, 2, 3))
    apart.k.fill_(1), apart.v.fill_(2)
    assert (apart.k == 1).all() and buffers.pools[1].sum() == apart.k.numel() + 2 * apart.v.numel()
    assert latent.latent is not None and latent.latent.shape == (5, 4, 10) and latent.k is None
    conv, total = state.state["conv"], state.state["sum"]
    assert (conv.dtype, conv.shape) == (torch.bfloat16, (3, 3, 5))
    assert (total.dtype, total.shape) == (torch.float32, (3, 7))
    conv.fill_(1), total.fill_(2)
    assert (conv == 1).all() and (total == 2).all()
    # 30 and 28 bytes, each in whole units of 16
    assert buffers.pools[4].shape == (3, 32 + 32)
    assert [layer.group for layer in buffers.kv] == [0, 1, 2, 0, 3]
    assert [layer.page_slots for layer in buffers.kv] == [4, 4, 4, 4, 1]


def test_the_canary_watches_pages_of_any_number_of_bytes() -> None:
    group = KVGroup(layers=(0,), layout=LatentKV(dim=9, rope_dim=2))
    shape = BufferShape(groups=(group,), page_size=1, rows=1, **TYPES, device=torch.device("cpu"))
    buffers = allocate_buffers(shape, (4,), 5)
    canary = Canary(None, buffers, (group,), padded=True)  # type: ignore[arg-type]
    assert buffers.pools[0][0].nbytes == 36  # no whole words

    canary.watched[0] = canary._fill_pages(0, torch.tensor([1, 3]))
    canary._verify_pages(0, 1)
    assert (buffers.pools[0][[1, 3]].view(torch.uint8) == 0x5A).all()
    assert (buffers.pools[0][[0, 2, 4]] == 0).all()
    buffers.pools[0][3, 0, 8] += 1e16
    with pytest.raises(EngineDied, match="before step 2 page 3 of layer 0 had been written"):
        canary._verify_pages(0, 2)


def test_an_output_is_as_wide_as_its_layer_says_and_dense() -> None:
    q = torch.zeros(3, 2, 10).transpose(0, 1)

    for out_dim, shape in ((None, (2, 3, 10)), (6, (2, 3, 6))):
        out = LayerInfo(index=0, group=0, scale=1.0, out_dim=out_dim).empty_output(q)
        assert out.shape == shape and out.is_contiguous()
    assert LatentKV(dim=10, rope_dim=4).out_dim == 6


@pytest.mark.parametrize("by_numpy", [True, False])
def test_a_step_finds_slots_by_token_and_state_pages_by_row(by_numpy: bool) -> None:
    buffers = make_buffers()
    full, _, _, state = buffers.page_tables
    full[:3] = torch.tensor([[3, 5, 0], [1, 0, 0], [2, 4, 6]], dtype=torch.int32)
    state[:3, 0] = torch.tensor([2, 0, 1], dtype=torch.int32)
    rows = torch.tensor([2, 0, 3])  # the last is the padding row
    batch = make_batch(
        buffers,
        row_ids=rows,
        starts=torch.tensor([5, 0, 0]),
        query_start=torch.tensor([0, 2, 3, 4], dtype=torch.int32),
        token_rows=torch.tensor([2, 2, 0, 3]),
        positions=torch.tensor([5, 8, 0, 0]),
        max_query_len=2,
        logit_indices=None,
        columns=RowColumns(),
        by_numpy=by_numpy,
    )

    assert batch.slots[0].tolist() == [4 * 4 + 1, 6 * 4, 3 * 4, 0]
    assert batch.slots[3].tolist() == [1, 1, 2, 0] and batch.slots[3].dtype is torch.int64
    assert batch.state_pages[:3] == (None, None, None)
    pages = batch.state_pages[3]
    assert pages is not None and pages.tolist() == [1, 2, 0] and pages.dtype is torch.int64
    assert batch.kv is buffers.kv


def test_a_failed_rows_state_becomes_finite_and_the_others_stay() -> None:
    buffers = make_buffers()
    buffers.page_tables[2][1, :2] = torch.tensor([4, 1], dtype=torch.int32)
    buffers.page_tables[3][:2, 0] = torch.tensor([1, 2], dtype=torch.int32)
    parts = [buffers.kv[2].latent, *buffers.kv[4].state.values()]
    for part in parts:
        assert part is not None
        part[1:] = math.nan

    buffers.zero_non_finite(np.array([1]), buffers.page_tables)

    for part, cleaned in zip(parts, ({1, 4}, {2}, {2}), strict=True):
        assert part is not None
        finite = part.isfinite().flatten(1).all(1).nonzero().flatten()
        assert set(finite.tolist()) == {0} | cleaned


@pytest.mark.parametrize("by_numpy", [True, False])
def test_attention_gets_the_tables_of_groups_that_keep_tokens(by_numpy: bool) -> None:
    states_first = (GROUPS[3], *GROUPS[:3])
    groups = tuple(evolve(group, layers=(n,)) for n, group in enumerate(states_first))
    buffers = make_buffers(groups)
    for number, table in enumerate(buffers.page_tables):
        table[1, 0] = 1 + number

    step = make_attention_step(
        buffers,
        Phase.DECODE,
        row_ids=torch.tensor([1]),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([1], dtype=torch.int32),
        host_query_lens=np.ones(1, np.int32),
        host_context_lens=np.ones(1, np.int32),
        by_numpy=by_numpy,
    )

    assert [table.tolist() for table in step.page_tables] == [[[2]], [[3]], [[4]]]
    rows = (LayerConfig(index=n, prefix="", group=n, scale=1.0) for n in range(4))
    found = list_attention_layers(evolve(MODEL, layers=tuple(rows), kv_groups=groups), {})
    assert {layer: info.group for layer, info in found.items()} == {1: 0, 2: 1, 3: 2}
