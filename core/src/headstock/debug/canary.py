"""The canary: each free page holds a pattern, which is checked before each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.errors import EngineDied
from headstock.execution.abstract_executor import Executor, Pending
from headstock.execution.buffers import Buffers
from headstock.scheduler import Plan, State
from headstock.spi import KVGroup

PATTERN = 0x5A5A5A5A5A5A5A5A
"""The bytes of a watched page. As numbers of any type of a pool they are finite and far too large
(1.5e16 in float32): a kernel that gives them a weight over 0 shows it, one that masks them not.
"""


class Canary(Executor):
    """Runs plans with `inner`, and raises EngineDied once a free page was written.

    A page is free if the scheduler has it as free when it makes a plan (`set_free_pages`). With
    overlap, a page that a plan frees may still be written by the step that runs then. So the page
    is filled with the pattern only when that plan is launched, behind the running step.

    padded: the runner pads batches. Padding rows write the dummy page, which must stay finite then
        and cannot hold the pattern.
    """

    def __init__(
        self, inner: Executor, buffers: Buffers, groups: tuple[KVGroup, ...], *, padded: bool
    ) -> None:
        self.inner = inner
        self.buffers = buffers
        self.groups = groups
        self.padded = padded
        self.free_pages: dict[int, tuple[tuple[np.ndarray, ...], ...]] = {}
        self.watched = [torch.zeros(0, dtype=torch.int64, device=buffers.device) for _ in groups]

    def set_free_pages(self, plan: Plan, state: State) -> None:
        """Store the pages that are free while `plan` runs."""
        # A plan without rows is never launched, so nothing would take its entry out again.
        if len(plan.rows):
            self.free_pages[plan.number] = tuple(tuple(stack) for stack in state.free)

    def execute(self, plan: Plan, new_rows: Mapping[int, Any]) -> Pending:
        """Check every watched page, then launch `plan`.

        writes: the pages that are free from this plan on
        raises: EngineDied
        """
        for group, free in enumerate(self.free_pages.pop(plan.number)):
            # The GPU's stream runs this behind the step before, so that step's writes are seen too.
            self._verify_pages(group, plan.number)
            pages = np.concatenate([*free, np.zeros(0 if self.padded else 1, np.int32)]).astype(
                np.int64
            )
            self.watched[group] = self._fill_pages(group, self.buffers.to_device(pages))
        return self.inner.execute(plan, new_rows)

    def check_alive(self) -> None:
        """See `Executor.check_alive`."""
        self.inner.check_alive()

    def prepare_next(self) -> int:
        """Capture one graph; return how many sizes are still without."""
        return self.inner.prepare_next()

    def pools_as_words(self, group: int) -> Mapping[int, Tensor]:
        """View the group's pools, by layer, as words: [pages, words] int64.

        Pages of latent vectors that eight bytes do not divide are [pages, bytes] uint8.
        """
        pools = {layer: self.buffers.pools[layer].flatten(1) for layer in self.groups[group].layers}
        return {
            layer: pool.view(torch.uint8 if pool[0].nbytes % 8 else torch.int64)
            for layer, pool in pools.items()
        }

    @torch.inference_mode()
    def _verify_pages(self, group: int, number: int) -> None:
        """Raise EngineDied when a watched page was written."""
        pages = self.watched[group]
        for layer, pool in self.pools_as_words(group).items():
            touched = pages[(pool[pages] != _pattern_of(pool)).any(1)].tolist()
            if touched:
                what = "the dummy page" if touched[0] == 0 else f"page {touched[0]}"
                raise EngineDied(
                    f"before step {number} {what} of layer {layer} had been written though it was "
                    f"free ({len(touched)} such pages); a kernel writes out of bounds, or a page "
                    "was freed too early"
                )
            # Padding rows may write the dummy page at any time, so finiteness is all it can
            # promise.
            if self.padded and not self._is_dummy_page_finite(layer):
                raise EngineDied(
                    f"before step {number} the dummy page of layer {layer} is not finite"
                )

    def _is_dummy_page_finite(self, layer: int) -> bool:
        """Whether all numbers of the layer's dummy page are finite, each as what it is."""
        # The pool of a state is bytes, which are always finite.
        parts = self.buffers.kv[layer].state.values() or (self.buffers.pools[layer],)
        return all(bool(part[0].to(torch.float32).isfinite().all()) for part in parts)

    @torch.inference_mode()
    def _fill_pages(self, group: int, pages: Tensor) -> Tensor:
        """Write the pattern to those of `pages` that are not watched yet.

        returns: pages
        writes: pools
        """
        # Watched pages hold the pattern already; to fill all of them would be a write of the whole
        # pool in every step.
        fresh = pages[~torch.isin(pages, self.watched[group])]
        for pool in self.pools_as_words(group).values():
            pool[fresh] = _pattern_of(pool)
        return pages

    def close(self) -> None:
        """Free the device."""
        self.inner.close()


def _pattern_of(pool: Tensor) -> int:
    """The pattern as one number of the pool's type."""
    return PATTERN if pool.dtype is torch.int64 else PATTERN & 0xFF
