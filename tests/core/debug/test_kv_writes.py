"""Writes to pages show in sums: beside the step's slots, in any layout, in regions as in pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attrs import frozen

from headstock.debug.kv_writes import KVWrites
from headstock.errors import PluginBroken
from headstock.execution.kv_pools import allocate_pool, view_layer
from headstock.spi import Batch, FullKV, KVGroup, LatentKV, LayerConfig, Layout

LAYERS = 2
LAYOUTS: dict[str, Layout] = {
    "one width": FullKV(kv_heads=2, k_dim=16, v_dim=16),
    "two widths": FullKV(kv_heads=2, k_dim=24, v_dim=16),
    "odd widths": FullKV(kv_heads=1, k_dim=5, v_dim=3),
    "latent": LatentKV(dim=24, rope_dim=8),
}
CELLS = (1, 2, 0)
"""Slots that the step writes, two in page 3 and one in page 5."""
PAGES = (3, 3, 5)


@frozen(eq=False)
class Step:
    """A step over pools of noise, and the watch over what it writes."""

    batch: Batch
    writes: KVWrites

    def write(self, layer: int, page: int, slot: int, *, part: int | None = None) -> None:
        """Write a slot, as operations do; NaN is written like other numbers."""
        kv = self.batch.kv[layer]
        parts = [each for each in (kv.k, kv.v, kv.latent) if each is not None]
        for each in parts if part is None else parts[part : part + 1]:
            each.view(torch.uint8)[page, slot] = 0xFF

    def run(self, fault: Callable[[Step], object], spared: tuple[int, ...] = ()) -> None:
        """Store both layers; the fault comes while the second is stored.

        spared: tokens whose values are not stored
        """
        for layer in range(LAYERS):
            config = LayerConfig(index=layer, prefix="", group=0, scale=1.0)
            self.writes.mark(config)
            for token, (page, slot) in enumerate(zip(PAGES, CELLS, strict=True)):
                self.write(layer, page, slot, part=0 if token in spared and layer else None)
            if layer:
                fault(self)
            self.writes.check(config)
        self.writes.check_all()


def make_step(
    layout: Layout, dtype: torch.dtype = torch.float32, page_size: int = 4, number: int = 0
) -> Step:
    """A step; its number says whose turn it is to be watched whole."""
    group = KVGroup(layers=tuple(range(LAYERS)), layout=layout)
    device = torch.device("cpu")
    pools = tuple(
        allocate_pool(group, 6, page_size, kv_dtype=dtype, dtype=dtype, device=device)
        for _ in range(LAYERS)
    )
    for pool in pools:
        pool.copy_(torch.rand(pool.shape))
    dummy = torch.tensor([0, 1])
    slots = torch.tensor(PAGES) * page_size + torch.tensor(CELLS)
    rows = torch.zeros(1, dtype=torch.int64)
    batch = Batch(
        tokens=slots,
        positions=slots,
        token_rows=slots,
        row_ids=rows,
        starts=rows,
        query_start=rows,
        max_query_len=5,
        slots=(torch.cat((slots, dummy)),),
        pools=pools,
        kv=tuple(view_layer(pool, 0, group, page_size, dtype) for pool in pools),
        logit_indices=None,
    )
    tables = (torch.tensor([[3, 5, 2, 0, 0]], dtype=torch.int32),)
    return Step(batch, KVWrites(batch, "it", number, tables))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_only_the_slots_of_a_step_may_be_written(layout: Layout, dtype: torch.dtype) -> None:
    make_step(layout, dtype).run(lambda step: step.write(0, 4, 1))  # of no row in the step
    make_step(layout, dtype).run(lambda step: step.write(1, 0, 3))  # the dummy page
    for layer in range(LAYERS):
        for page in (5, 2):  # one that the step writes, and one that its row only reads
            with pytest.raises(
                PluginBroken, match=f"it wrote to page {page} of layer {layer} outside"
            ):
                make_step(layout, dtype).run(
                    lambda step, layer=layer, page=page: step.write(layer, page, 3)
                )


@pytest.mark.parametrize("name", ["one width", "two widths", "odd widths"])
def test_a_slot_that_is_left_out_is_named(name: str) -> None:
    with pytest.raises(PluginBroken, match="left values of layer 1 unwritten at slot 2 of page 3"):
        make_step(LAYOUTS[name]).run(lambda step: None, spared=(1,))


def test_regions_are_watched_behind_the_context_and_to_their_end_in_turn() -> None:
    layout, size = LAYOUTS["one width"], 4096

    def write_end(step: Step) -> None:
        step.write(1, 5, size - 1)

    with pytest.raises(PluginBroken, match="it wrote to page 3 of layer 0"):
        make_step(layout, page_size=size).run(lambda step: step.write(0, 3, 40))
    caught = []
    for number in range(2 * LAYERS):
        try:
            make_step(layout, page_size=size, number=number).run(write_end)
        except PluginBroken as error:
            caught.append((number, str(error)))
    assert len(caught) == 1
    assert "it wrote to page 5 of layer 1" in caught[0][1]
