"""What a step gives and writes, beside what the eager reference gives and writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.execution.buffers import Buffers
from headstock.scheduler import Plan
from headstock.spi import Sample
from headstock.spi.arrays import Ints
from headstock_conformance.runner.rig import PAGE_SIZE, split_layer
from headstock_conformance.runner.rows import SeatedRow, find_sampled, join_runs

TOLERANCE = 1e-3
"""What numbers may be off by, as a share of the largest: float32, summed in another order."""

Rows = Mapping[int, SeatedRow]


@frozen(eq=False)
class Snapshot:
    """The tables and the pools at some time, on the host.

    parts: by layer, those of its pages
    """

    tokens: Tensor
    page_tables: tuple[Tensor, ...]
    parts: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def take(cls, buffers: Buffers) -> Snapshot:
        """What buffers hold now."""
        return cls(
            buffers.tokens.to("cpu", copy=True),
            tuple(table.to("cpu", copy=True) for table in buffers.page_tables),
            tuple(
                tuple(part.to("cpu", copy=True) for part in split_layer(layer))
                for layer in buffers.kv
            ),
        )


def compare_samples(plan: Plan, rows: Rows, found: Sample, wanted: Sample) -> None:
    """Compare what was sampled, scored and pooled.   raises: AssertionError"""
    logit_rows, at = plan.rows.repeat(plan.num_logits), join_runs(plan.stops, plan.num_logits)
    assert len(found.tokens) == len(at), (
        f"{len(found.tokens)} tokens are sampled, and {len(at)} are scored; Sample.order says "
        "where the step's own are"
    )
    for name, which in (("healthy", np.arange(len(at))), ("tokens", find_sampled(plan))):
        ours, theirs = getattr(found, name)[which], getattr(wanted, name)[which]
        wrong = (ours != theirs).nonzero().flatten().tolist()
        if not wrong:
            continue
        first = which[wrong[0]]
        is_moved = sorted(ours.tolist()) == sorted(theirs.tolist())
        raise AssertionError(
            f"{name}: {ours[wrong[0]]} for row {logit_rows[first]} behind position {at[first]}, "
            f"and eager gives {theirs[wrong[0]]}"
            + ("; those of all rows are there, in another order" if is_moved else "")
        )
    compare_scores(plan, rows, found, wanted)
    compare_pooled(plan, found, wanted)


def compare_drafts(
    plan: Plan,
    verified: Tensor | None,
    wanted_verified: Tensor | None,
    drafts: Tensor | None,
    wanted: Tensor,
) -> None:
    """Compare what a step says that it verified, and what is guessed behind it.

    verified: `Sample.verified`    drafts, wanted: [rows, k], what `Sample.make_drafts` gave
    raises: AssertionError
    """
    assert verified is not None and wanted_verified is not None, (
        "Sample.verified is missing, where the model makes drafts of its own"
    )
    for at in find_sampled(plan).tolist():
        assert verified[at] == wanted_verified[at], (
            f"verified: {verified[at]} at logit {at}, and eager verifies {wanted_verified[at]}"
        )
    assert drafts is not None, "Sample.make_drafts is missing, where the model makes drafts"
    assert drafts.shape == wanted.shape, (
        f"drafts of shape {list(drafts.shape)}, and eager makes {list(wanted.shape)}"
    )
    for index, row in enumerate(plan.rows.tolist()):
        assert not plan.samples[index] or torch.equal(drafts[index], wanted[index]), (
            f"drafts {drafts[index].tolist()} for row {row}, and eager makes "
            f"{wanted[index].tolist()}"
        )


def compare_scores(plan: Plan, rows: Rows, found: Sample, wanted: Sample) -> None:
    """Compare the log-probabilities of rows that ask for them.   raises: AssertionError"""
    sampled = set(find_sampled(plan).tolist())
    logit_rows, at = plan.rows.repeat(plan.num_logits), join_runs(plan.stops, plan.num_logits)
    for index, (row, position) in enumerate(zip(logit_rows.tolist(), at.tolist(), strict=True)):
        request = rows[row].request
        num_top = request.params.logprobs if index in sampled else None
        if request.prompt_logprobs and position + 1 < len(request.prompt):
            num_top = request.params.prompt_logprobs
        if num_top is None:
            continue
        for name in ("logprobs", "ranks", "top_logprobs", "top_ids"):
            ours, theirs = getattr(found, name), getattr(wanted, name)
            where = f"{name} of row {row} behind position {position}"
            assert ours is not None, f"there are no {where}, which asks for them"
            width = num_top if name.startswith("top") else None
            ours, theirs = (each[index].double().reshape(-1)[:width] for each in (ours, theirs))
            assert torch.allclose(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE), (
                f"{where}: {ours.tolist()}, and eager gives {theirs.tolist()}"
            )


def compare_pooled(plan: Plan, found: Sample, wanted: Sample) -> None:
    """Compare the vectors of rows that pool, where their prompts end.   raises: AssertionError"""
    if not len(plan.pooling):
        return
    # Core has compared the shapes.
    assert found.pooled is not None and wanted.pooled is not None
    is_end = plan.pooling[plan.pooled_rows] == 2
    ends = is_end.nonzero()[0].tolist()
    for row, index in zip(plan.rows[plan.pooled_rows][is_end], ends, strict=True):
        off = share_off(found.pooled[index], wanted.pooled[index])
        assert off <= TOLERANCE, f"the vector of row {row} is off by {off:.1e} of the largest"


def compare_writes(
    plan: Plan, rows: Rows, buffers: Buffers, snapshots: tuple[Snapshot, Snapshot, Snapshot]
) -> None:
    """Compare what a step has written with what it may write.

    snapshots: what the runner found, what it left, and what the reference left
    raises: AssertionError
    """
    before, found, wanted = snapshots
    for ours, old in zip(found.page_tables, before.page_tables, strict=True):
        assert torch.equal(ours, old), "a page table is written, which core alone does"
    compare_tokens(plan, rows, (before.tokens, found.tokens, wanted.tokens))
    for group in range(len(buffers.groups)):
        places = Places.find(plan, rows, group, is_state=group in buffers.state_pools)
        for index, layer in enumerate(buffers.kv):
            if layer.group == group:
                for parts in zip(*(each.parts[index] for each in snapshots), strict=True):
                    compare_pages(index, places, *parts)


def compare_tokens(plan: Plan, rows: Rows, tables: tuple[Tensor, Tensor, Tensor]) -> None:
    """Compare the token table; a row of the step may have anything behind its newest token.

    tables: as it was, as it is, and the reference's
    raises: AssertionError
    """
    old, found, wanted = tables
    right = old.clone()
    for row, end in zip(plan.rows.tolist(), (plan.stops + plan.samples).tolist(), strict=True):
        end = max(end, len(rows[row].tokens))
        right[row, :end], right[row, end:] = wanted[row, :end], found[row, end:]
    wrong = (found[:-1] != right[:-1]).nonzero().tolist()
    if not wrong:
        return
    in_step = set(plan.rows.tolist())
    row, at = min(wrong, key=lambda place: (place[0] not in in_step, place))
    if row not in in_step:
        reason = "the row is not in this step"
    elif wanted[row, at] == old[row, at]:
        reason = "that token was known"
    elif found[row, at] == old[row, at]:
        reason = "RowTables.keep stores what is sampled, where Step.list_stored says"
    else:
        reason = "another token is stored than was sampled"
    raise AssertionError(
        f"the token table of row {row} at {at}: expected {right[row, at]}, got {found[row, at]}: "
        f"{reason}"
    )


@frozen(eq=False)
class Places:
    """Where a step writes in the pages of a group: what it must, and what it may.

    A row may have anything finite behind the tokens that it computes; the dummy page is for
    padding.

    kind: of what is kept there
    rows: [written], whose each place is
    written, spare: indices of a part's first dimensions, [places] each
    """

    kind: str
    rows: Ints
    written: tuple[Tensor, ...]
    spare: tuple[Tensor, ...]

    @classmethod
    def find(cls, plan: Plan, rows: Rows, group: int, *, is_state: bool) -> Places:
        """Where the rows of a plan have what they compute."""
        pages = np.stack([rows[row].pages[group] for row in plan.rows.tolist()])
        if is_state:
            where = (torch.from_numpy(pages[:, 0]).long(),)
            return cls("states", plan.rows, where, where)
        ends = np.full_like(plan.stops, pages.shape[1] * PAGE_SIZE)
        written, spare = (
            _find_slots(pages, stops, stops - plan.starts) for stops in (plan.stops, ends)
        )
        return cls("keys and values", plan.rows.repeat(plan.stops - plan.starts), written, spare)


def _find_slots(pages: Ints, stops: Ints, counts: Ints) -> tuple[Tensor, Tensor]:
    """The page of `counts` positions before `stops` and the place in it, row by row."""
    at = join_runs(stops, counts)
    numbers = pages[np.arange(len(pages)).repeat(counts), at // PAGE_SIZE]
    return torch.from_numpy(numbers).long(), torch.from_numpy(at % PAGE_SIZE)


def compare_pages(layer: int, places: Places, old: Tensor, found: Tensor, wanted: Tensor) -> None:
    """Compare a part of a layer's pages: as they were, as they are, and the reference's.

    raises: AssertionError
    """
    ours, theirs = (each[places.written] for each in (found, wanted))
    if share_off(ours, theirs) > TOLERANCE:
        offs = [share_off(*each) for each in zip(ours, theirs, strict=True)]
        worst = int(np.argmax(offs))
        raise AssertionError(
            f"{places.kind} of row {places.rows[worst]} in layer {layer} are off by "
            f"{offs[worst]:.1e} of the largest"
        )
    changed = find_changed(old, found)
    changed[0] = False
    changed[places.spare] = False
    assert not changed.any(), (
        f"{places.kind} in layer {layer} are written in page {int(changed.nonzero()[0, 0])}: "
        "no row of the step has what it computes there"
    )
    assert bool(found[0].isfinite().all()), "the dummy page is not finite any more"


def compare_untouched(before: Snapshot, buffers: Buffers, who: str) -> None:
    """Check that nothing is written but the padding row and its page.   raises: AssertionError"""
    after = Snapshot.take(buffers)
    for ours, old in zip(after.page_tables, before.page_tables, strict=True):
        assert torch.equal(ours, old), f"{who} writes a page table"
    wrong = (after.tokens[:-1] != before.tokens[:-1]).nonzero().tolist()
    assert not wrong, (
        f"{who} leaves {after.tokens[*wrong[0]]} for row {wrong[0][0]} at {wrong[0][1]} in the "
        "token table; it may run the padding row alone"
    )
    for layer, parts in enumerate(zip(before.parts, after.parts, strict=True)):
        for old, ours in zip(*parts, strict=True):
            assert not find_changed(old, ours)[1:].any(), (
                f"{who} writes to pages of rows in layer {layer}; it may run the padding row alone"
            )
            assert bool(ours[0].isfinite().all()), f"{who} leaves the dummy page not finite"


def find_changed(old: Tensor, found: Tensor) -> Tensor:
    """Where any bit of a part of pages has changed, [pages, page_size]; [pages] for a state."""
    is_other = old.view(torch.int32) != found.view(torch.int32)
    return is_other.flatten(2).any(-1) if is_other.dim() > 2 else is_other.any(-1)


def share_off(found: Tensor, wanted: Tensor) -> float:
    """The error as a share of the largest number; infinite if one is NaN."""
    off = (found.double() - wanted.double()).abs()
    off = off.masked_fill(found.isnan() & wanted.isnan(), 0.0).nan_to_num(nan=torch.inf)
    largest = wanted.double().nan_to_num(nan=0.0).abs().amax().clamp(min=1e-9)
    return float(off.amax() / largest)
