"""A watch over the pages that nobody may write: each free page holds a pattern, and before each
step it must still.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.errors import EngineDied
from headstock.execution.buffers import Buffers
from headstock.scheduler import Plan, State
from headstock.spi import Executor, KVGroup, Pending

PATTERN = 0x5A5A5A5A5A5A5A5A
"""The bytes of a watched page. As numbers of any type that a pool may have they are finite and
absurdly large (1.5e16 in float32), so that a kernel that weighs them by more than 0 gives itself
away, and one that masks them does not.
"""


class Canary(Executor):
    """Carries out plans with `inner`, and raises EngineDied as soon as a free page was written.

    Pages are free as the scheduler has it when it makes a plan (`expect`). What a step that is
    still running may write was not free when that step was planned, so pages freed since are filled
    only now, after it, and watched from here on. `padded`: the runner pads batches, and padding may
    write the dummy page, which must stay finite then.
    """

    def __init__(
        self, inner: Executor, buffers: Buffers, groups: tuple[KVGroup, ...], *, padded: bool
    ) -> None:
        self.inner = inner
        self.buffers = buffers
        self.groups = groups
        self.padded = padded
        self.expected: dict[int, tuple[tuple[np.ndarray, ...], ...]] = {}
        self.watched = [torch.zeros(0, dtype=torch.int64, device=buffers.device) for _ in groups]

    def expect(self, plan: Plan, state: State) -> None:
        """Note the pages that are free while `plan` runs."""
        if len(plan.rows):
            self.expected[plan.number] = state.free

    def execute(self, plan: Plan, new_rows: Mapping[int, Any]) -> Pending:
        """Launch `plan` once every watched page is found untouched.

        writes: the pages that are free from this plan on
        raises: EngineDied
        """
        for group, free in enumerate(self.expected.pop(plan.number)):
            self.verify(group, plan.number)
            pages = np.concatenate([*free, np.zeros(0 if self.padded else 1, np.int32)]).astype(
                np.int64
            )
            self.watched[group] = self.fill(group, self.buffers.to_device(pages))
        return self.inner.execute(plan, new_rows)

    def pools(self, group: int) -> Mapping[int, Tensor]:
        """The group's pools in words of eight bytes, by layer.   [pages, words] int64"""
        # A head's key and value are at least four numbers each, or wider ones: eight bytes divide
        # every page.
        return {
            layer: self.buffers.pools[layer].flatten(1).view(torch.int64)
            for layer in self.groups[group].layers
        }

    @torch.inference_mode()
    def verify(self, group: int, number: int) -> None:
        """Raise EngineDied when a watched page was written."""
        pages = self.watched[group]
        for layer, pool in self.pools(group).items():
            touched = pages[(pool[pages] != PATTERN).any(1)].tolist()
            if touched:
                what = "the dummy page" if touched[0] == 0 else f"page {touched[0]}"
                raise EngineDied(
                    f"before step {number} {what} of layer {layer} had been written though it was "
                    f"free ({len(touched)} such pages); a kernel writes where it may not, or a "
                    "page was freed too early"
                )
            if self.padded and not self.buffers.pools[layer][0].to(torch.float32).isfinite().all():
                raise EngineDied(
                    f"before step {number} the dummy page of layer {layer} is not finite"
                )

    @torch.inference_mode()
    def fill(self, group: int, pages: Tensor) -> Tensor:
        """Write the pattern to those of `pages` that are not watched yet.

        returns: pages
        writes: pools
        """
        fresh = pages[~torch.isin(pages, self.watched[group])]
        for pool in self.pools(group).values():
            pool[fresh] = PATTERN
        return pages

    def close(self) -> None:
        """Free the device."""
        self.inner.close()
