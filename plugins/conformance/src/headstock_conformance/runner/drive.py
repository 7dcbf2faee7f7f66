"""A runner driven beside the eager reference: the same steps, compared one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from attrs import define, field, fields

from headstock.execution.step import PlannedStep
from headstock.scheduler import Plan, Request, RequestState
from headstock.spi import ReplayLimits, ReplaySizes, Sample, Sampling
from headstock.spi.arrays import Ints
from headstock_conformance.runner.comparison import (
    Snapshot,
    compare_drafts,
    compare_samples,
    compare_untouched,
    compare_writes,
)
from headstock_conformance.runner.rig import PAGE_SIZE, Rig, split_layer
from headstock_conformance.runner.rows import SeatedRow, Work, count_drafts, make_plan

LEFT_BEHIND = 3.0
"""What the pages of a row hold at first: numbers of a request before it."""


class FailingStep(PlannedStep):
    """A step whose settings of sampling cannot be made."""

    def kind(self, places: Ints | None = None) -> frozenset[str] | None:
        """Raise InterruptedError."""
        raise InterruptedError("sampling fails")

    def sampling(self, row_ids: Ints | None = None, positions: Ints | None = None) -> Sampling:
        """Raise InterruptedError."""
        raise InterruptedError("sampling fails")


@define(eq=False)
class Drive:
    """Two rigs of one model that get the same plans.

    may_replay: the runner has replays
    num_left: sizes whose replays are made between steps
    num_steps, num_replays: so far
    """

    subject: Rig
    reference: Rig
    may_replay: bool = False
    num_left: int = 0
    rows: dict[int, SeatedRow] = field(factory=dict)
    free_pages: list[list[int]] = field(factory=list)
    num_steps: int = 0
    num_replays: int = 0

    def __attrs_post_init__(self) -> None:
        """Begin with all pages free, in no order."""
        rng = np.random.default_rng(11)
        for table in self.reference.buffers.page_tables:
            count = (len(table) - 1) * table.shape[1]
            self.free_pages.append((1 + rng.permutation(count)).tolist())

    def admit(self, row: int, request: Request, *, beside: int = 0, pages: int = 0) -> None:
        """Give a row to a request, from the next step that it is part of.

        pages: how many leading pages it has in common with the row `beside`, computed by that
        """
        if row in self.rows:
            self.free(row)
        own = []
        for group, table in enumerate(self.reference.buffers.page_tables):
            lead = self.rows[beside].pages[group][:pages].tolist() if pages else []
            rest = [self.free_pages[group].pop() for _ in range(table.shape[1] - len(lead))]
            self.fill(group, rest, LEFT_BEHIND)
            own.append(np.array([*lead, *rest], np.int32))
        self.rows[row] = SeatedRow(request, tuple(own), request.prompt.tolist(), pages * PAGE_SIZE)

    def free(self, row: int) -> None:
        """End a row's request; nothing may read its pages any more."""
        for group, numbers in enumerate(self.rows.pop(row).pages):
            self.fill(group, numbers.tolist(), torch.nan)
            self.free_pages[group][:0] = numbers.tolist()

    def fill(self, group: int, pages: Sequence[int], value: float) -> None:
        """Fill pages of both rigs: NaN shows when it is read, a number is what others left."""
        for rig in (self.subject, self.reference):
            for layer in rig.buffers.kv:
                if layer.group == group:
                    for part in split_layer(layer):
                        part[torch.tensor(pages, device=part.device)] = value

    def step(self, *works: Work | int) -> Sample:
        """Run a step, and compare what it gives and what it writes.

        works: numbers are rows that compute all their known tokens
        returns: what the reference gives
        raises: AssertionError with the first difference; PluginBroken
        """
        if self.num_left:
            self.prepare_next()
        todo = [Work(row=work) if isinstance(work, int) else work for work in works]
        plan = make_plan(self.rows, todo, self.num_steps)
        new_rows = {row: self.make_state(row) for row in plan.new_row_ids.tolist()}
        with self.naming_step(plan):
            before = self.take_applied(plan, new_rows)
            rigs = self.subject, self.reference
            launched, other = (rig.executor.execute(plan, new_rows) for rig in rigs)
            self.num_replays += launched.is_replayed
            assert self.may_replay or not launched.is_replayed, (
                "the sample says that it was a replay, and nothing is prepared"
            )
            # Now: what is no number in the pages of an unsound row is zero after `wait`.
            after, right = (Snapshot.take(rig.buffers) for rig in rigs)
            found, wanted = launched.wait(), other.wait()
            compare_samples(plan, self.rows, found, wanted)
            if other.has_drafts:
                drafts = launched.wait_drafts() if launched.has_drafts else None
                compare_drafts(plan, found.verified, wanted.verified, drafts, other.wait_drafts())
            compare_writes(plan, self.rows, self.subject.buffers, (before, after, right))
        self.advance(plan, wanted)
        self.num_steps += 1
        return wanted

    def fail_step(self, *rows: int) -> None:
        """Have a step of these rows raise in sampling; their requests end, as in an engine."""

        plan = make_plan(self.rows, [Work(row=row) for row in rows], self.num_steps)
        step = self.subject.executor.steps.make_step(plan)
        step = FailingStep(**{each.name: getattr(step, each.name) for each in fields(PlannedStep)})
        # A runner may sample without either, and then nothing is wrong.
        with suppress(InterruptedError):
            self.subject.runner.run(step)
        for row in rows:
            self.free(row)

    def take_applied(self, plan: Plan, new_rows: dict[int, RequestState]) -> Snapshot:
        """What the runner finds: the tables as core makes them for the plan."""
        tokens = {row: entry.tokens for row, entry in new_rows.items()}
        # The executor does it once more, which changes nothing.
        self.subject.buffers.apply_plan(plan, tokens)
        return Snapshot.take(self.subject.buffers)

    def make_state(self, row: int) -> RequestState:
        """A request as a plan admits it."""
        seated = self.rows[row]
        tokens = np.array(seated.tokens, np.int32)
        return RequestState(request=seated.request, tokens=tokens, arrival=0)

    @contextmanager
    def naming_step(self, plan: Plan) -> Iterator[None]:
        """Say which step a difference is in."""
        try:
            yield
        except AssertionError as error:
            spans = [
                f"row {row} from {start} to {stop}"
                for row, start, stop in zip(plan.rows, plan.starts, plan.stops, strict=True)
            ]
            more = f" and {len(spans) - 3} more" if len(spans) > 3 else ""
            where = f"step {self.num_steps + 1} ({', '.join(spans[:3])}{more})"
            raise AssertionError(f"{where}: {error}") from error

    def advance(self, plan: Plan, sample: Sample) -> None:
        """Take what the reference sampled as the rows' tokens; drafts as far as they agree."""
        ends, num_drafts = plan.num_logits.cumsum(), count_drafts(plan)
        tokens, drafts = sample.tokens.tolist(), iter(plan.drafts.tolist())
        # Drafts of the model's own layers are in the token table, and -1 in the plan.
        own = None if sample.verified is None else sample.verified.tolist()
        for index, number in enumerate(plan.rows.tolist()):
            row, count = self.rows[number], int(num_drafts[index])
            guesses = [next(drafts) for _ in range(count)]
            guesses = guesses if own is None else own[ends[index] - count : ends[index]]
            row.is_new, row.computed = False, int(plan.stops[index]) - count
            if not plan.samples[index]:
                continue
            sampled = tokens[ends[index] - count - 1 : ends[index]]
            accepted = 0
            while accepted < count and guesses[accepted] == sampled[accepted]:
                accepted += 1
            row.tokens += sampled[: accepted + 1]
            row.computed += accepted

    def plant(self, number: int, tokens: Sequence[int]) -> None:
        """Put tokens where both rigs have the drafts of a row, as if its model had made them."""
        first = len(self.rows[number].tokens)
        for rig in (self.subject, self.reference):
            table = rig.buffers.tokens
            table[number, first : first + len(tokens)] = torch.tensor(tokens, device=table.device)

    def foresee(self, number: int, count: int) -> list[int]:
        """The tokens that the reference will sample next in a row that decodes."""
        row, table = self.rows[number], self.reference.buffers.tokens
        saved, known, tokens = table.clone(), row.tokens, list[int]()
        for _ in range(count):
            plan = make_plan(self.rows, [Work(row=number)], self.num_steps)
            tokens.append(int(self.reference.executor.execute(plan, {}).wait().tokens[-1]))
            row.tokens, row.computed = [*row.tokens, tokens[-1]], row.computed + 1
        table.copy_(saved)
        row.tokens, row.computed = known, row.computed - count
        return tokens

    def prepare(self, limits: ReplayLimits) -> ReplaySizes:
        """Have the runner prepare its replays, as an engine does.

        raises: AssertionError when it writes what rows have, or answers against the contract
        """
        reports: list[tuple[int, int]] = []
        before = Snapshot.take(self.subject.buffers)
        sizes: object = self.subject.runner.prepare(
            limits, lambda done, total: reports.append((done, total))
        )
        compare_untouched(before, self.subject.buffers, "prepare")
        check_sizes(sizes, limits)
        assert isinstance(sizes, ReplaySizes)
        numbers = list(range(1, len(reports) + 1))
        assert [done for done, _ in reports] == numbers and all(
            done <= total for done, total in reports
        ), f"prepare: expected reports (1, total), (2, total), ..., got {reports[:4]}"
        self.may_replay, self.num_left = bool(sizes.rows or sizes.tokens), sizes.num_left
        return sizes

    def prepare_next(self) -> None:
        """Have the runner make one replay that was left.   raises: as `prepare`"""
        before = Snapshot.take(self.subject.buffers)
        left: object = self.subject.executor.prepare_next()
        compare_untouched(before, self.subject.buffers, "prepare_next")
        assert isinstance(left, int) and 0 <= left <= self.num_left, (
            f"prepare_next returns {left!r}, where {self.num_left} were left before"
        )
        self.num_left = left


def check_sizes(sizes: object, limits: ReplayLimits) -> None:
    """Check what `prepare` returns.   raises: AssertionError"""
    assert isinstance(sizes, ReplaySizes), f"prepare: expected ReplaySizes, got {sizes!r}"
    for name, numbers in (("rows", sizes.rows), ("tokens", sizes.tokens)):
        is_sorted = list(numbers) == sorted(set(numbers), reverse=True)
        assert is_sorted and min(numbers, default=1) > 0, (
            f"prepare: {name}: expected sizes from the largest on, got {numbers}"
        )
    assert max(sizes.rows, default=0) <= limits.max_rows, (
        f"prepare returns rows {sizes.rows}, and max_rows is {limits.max_rows}"
    )
    assert limits.may_defer or not sizes.num_left, (
        f"prepare leaves {sizes.num_left} sizes for later, and may_defer is False"
    )
