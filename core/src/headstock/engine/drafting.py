"""Drafts of running rows: which rows get draft tokens, and how many were accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from headstock.engine.output_tracker import OutputTracker
from headstock.engine.tracked_request import DraftHistory
from headstock.errors import PluginBroken, describe_error, shorten
from headstock.execution.abstract_executor import Pending
from headstock.scheduler import Limits, Plan, RequestState, Sampled
from headstock.spi import Proposer, Sample
from headstock.spi.arrays import Ints
from headstock.startup.build import EngineBuild

STEP_TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 16, "cuda": 128})
"""Tokens up to which a step takes hardly longer than one of a single token, by device.

It reads all weights in either case. Drafts make no larger steps.
"""


@define(eq=False)
class DraftCounts:
    """Counts since the start.

    proposed, accepted: drafts that were verified, and those of them that were right
    steps, replayed_steps: steps that verified drafts, and those of them that replayed a graph
    """

    proposed: int = 0
    accepted: int = 0
    steps: int = 0
    replayed_steps: int = 0


@frozen(eq=False)
class SampledRows:
    """What a step sampled for its healthy rows: row i got `counts[i]` of `tokens`.

    rows, admission_ids, counts, num_drafts: [n] int32; the last two None in a step without drafts,
        which gives each row a token
    tokens: [sum of counts] int32
    """

    rows: Ints
    admission_ids: Ints
    counts: Ints | None
    num_drafts: Ints | None
    tokens: Ints


def read_verified(plan: Plan, last_logits: Ints, sample: Sample) -> Plan:
    """Return the plan of a step that is over, with the drafts that it has verified.

    last_logits: the plan's    sample: in host memory
    raises: PluginBroken by the runner
    """
    if not (plan.drafts < 0).any():
        return plan
    if sample.verified is None:
        raise PluginBroken(
            "the runner verified drafts of the model's own layers and did not say which: expected "
            "Sample.verified; report it to its author, or set runner (--runner) to eager"
        )
    ends = np.cumsum(plan.num_drafts)
    firsts = np.repeat(last_logits + 1 - ends, plan.num_drafts)
    drafts = sample.verified.numpy()[firsts + np.arange(ends[-1])]
    return evolve(plan, drafts=drafts.astype(np.int32))


def accept_drafts(plan: Plan, last_logits: Ints, which: Ints, samples: Ints) -> SampledRows:
    """Accept the drafts of a step that are equal to the sample before them.

    last_logits: the plan's
    which: [n] int64, the rows of the plan that are sampled and healthy
    samples: [logits] int64, in the plan's order
    """
    if not len(plan.num_drafts):
        tokens = samples[last_logits[which]].astype(np.int32)
        rows, admission_ids = plan.rows[which], plan.admission_ids[which]
        return SampledRows(rows, admission_ids, None, None, tokens)
    num_drafts = plan.num_drafts[which]
    offsets = np.arange(int(num_drafts.max(initial=0)) + 1)
    in_row = offsets <= num_drafts[:, None]
    first = last_logits[which] - num_drafts
    grid = samples[np.where(in_row, first[:, None] + offsets, 0)]
    counts = np.ones(len(which), np.int32)
    if len(offsets) > 1:
        # The drafts of rows that failed are in the plan too.
        starts = (np.cumsum(plan.num_drafts) - plan.num_drafts)[which]
        at = np.where(in_row[:, 1:], starts[:, None] + offsets[:-1], 0)
        is_right = in_row[:, 1:] & (plan.drafts[at] == grid[:, :-1])
        counts += np.logical_and.accumulate(is_right, axis=1).sum(1, dtype=np.int32)
    return SampledRows(
        rows=plan.rows[which],
        admission_ids=plan.admission_ids[which],
        counts=counts,
        num_drafts=num_drafts,
        tokens=grid[offsets < counts[:, None]].astype(np.int32),
    )


@frozen(eq=False)
class MadeDrafts:
    """Drafts that the model's own layers make behind a step, which the host plans without.

    pending: the step    which: [n] int64, the rows of its plan that are sampled and healthy
    """

    pending: Pending
    which: Ints

    def read(self) -> Ints:
        """Wait for the drafts of these rows. [n, k] int32   raises: as `Pending.wait`"""
        drafts: Ints = self.pending.wait_drafts().numpy()[self.which].astype(np.int32)
        return drafts


@define(eq=False)
class Drafting:
    """Asks a proposer for drafts, and counts what came of them.

    name: of the proposer, for errors
    by_model: as in `ProposerSpec`
    asked_ids: the admission ids that the proposer was asked about and that have not ended
    max_step_tokens: drafts never make a step of more tokens, with one for each running row
    """

    proposer: Proposer
    name: str
    limits: Limits
    vocab: int
    max_step_tokens: int
    tracker: OutputTracker
    by_model: bool = False
    counts: DraftCounts = field(factory=DraftCounts)
    asked_ids: set[int] = field(factory=set)

    def track_admissions(self, new_rows: Mapping[int, RequestState | None]) -> None:
        """Begin the histories of requests that got a row."""
        for entry in new_rows.values():
            if entry is not None:
                tokens = np.zeros(entry.request.max_len + self.limits.max_drafts, np.int32)
                tokens[: len(entry.tokens)] = entry.tokens
                tracked = self.tracker.requests[entry.request.id]
                tracked.drafts = DraftHistory(tokens, len(entry.tokens), entry.request.max_len)

    def count_step(self, plan: Plan, pending: Pending) -> None:
        """Count a step that has run, if it verified drafts."""
        if len(plan.drafts):
            self.counts.steps += 1
            self.counts.replayed_steps += pending.is_replayed

    def needs_drafts(self, plan: Plan) -> bool:
        """Whether the drafts behind a step are needed to plan the next one: masks follow them."""
        if not self.by_model or not self.tracker.num_followed:
            return False
        running = map(self.tracker.by_admission_id.get, plan.admission_ids.tolist())
        return any(each is not None and each.followed is not None for each in running)

    def make_event(
        self, sampled: SampledRows, in_flight: Plan | None, made: MadeDrafts | None = None
    ) -> Sampled:
        """Make the event of a step's samples, with drafts of what may follow them.

        in_flight: the plan that runs now; rows of it get no drafts, but may be held back for some
        made: those that the model makes behind the step; None without a proposer `by_model`
        raises: PluginBroken
        """
        if self.by_model and made is None:
            raise PluginBroken(
                f"the runner claims drafts and returned none for the proposer {self.name!r}: "
                "expected Sample.make_drafts; report it to its author, or set runner (--runner) to "
                "eager"
            )
        asked: list[tuple[int, DraftHistory]] = []
        columns: tuple[Iterable[int], ...] = repeat(1), repeat(0)
        has_drafts = sampled.num_drafts is not None and bool(sampled.num_drafts.any())
        if sampled.counts is not None and sampled.num_drafts is not None:
            columns = sampled.counts.tolist(), sampled.num_drafts.tolist()
        entries = zip(sampled.admission_ids.tolist(), *columns, strict=False)
        stop = 0
        for i, (admission_id, count, num_drafts) in enumerate(entries):
            start, stop = stop, stop + count
            self.counts.proposed += num_drafts
            self.counts.accepted += count - 1
            tracked = self.tracker.by_admission_id.get(admission_id)
            # Under overlap the row may have another request by now; such samples are dropped.
            if tracked is None or tracked.drafts is None:
                continue
            drafted = tracked.drafts
            drafted.append(sampled.tokens[start:stop])
            # The model has made its drafts by the time that a rest would spare them.
            if num_drafts and not self.by_model:
                drafted.count_hits(count - 1)
            has_drafts |= drafted.is_held
            if not drafted.rest:
                asked.append((i, drafted))
        # The event of an engine without a proposer, which costs the scheduler a third.
        plain = Sampled(sampled.rows, sampled.admission_ids, None, sampled.tokens)
        if not asked and not has_drafts:
            return plain
        busy = set() if in_flight is None else set(in_flight.admission_ids.tolist())
        drafts, hold = self._propose(asked, sampled.admission_ids, busy, len(sampled.rows), made)
        if not has_drafts and not drafts and not hold.any():
            return plain
        lengths = np.zeros(len(sampled.rows), np.int32)
        for i, tokens in drafts.items():
            lengths[i] = len(tokens)
        return Sampled(
            sampled.rows,
            sampled.admission_ids,
            np.ones_like(lengths) if sampled.counts is None else sampled.counts,
            sampled.tokens,
            lengths,
            np.concatenate([np.zeros(0, np.int32), *(drafts[i] for i in sorted(drafts))]),
            hold,
        )

    def _propose(
        self,
        asked: Sequence[tuple[int, DraftHistory]],
        admission_ids: Ints,
        busy: set[int],
        num_rows: int,
        made: MadeDrafts | None,
    ) -> tuple[dict[int, Ints], Ints]:
        """Return the drafts by row of the event, and which rows are held back, [num_rows] int32.

        made: as in `make_event`
        """
        hold = np.zeros(num_rows, np.int32)
        share = self.max_step_tokens // max(num_rows, 1) - 1
        most = min(self.limits.max_drafts, share)
        # The token after the last draft must still fit.
        rooms = [min(most, drafted.max_len - 1 - drafted.length) for _, drafted in asked]
        for (_, drafted), free in zip(asked, rooms, strict=True):
            drafted.is_held &= free > 0  # nothing is left to sit out for
        ready = [entry for entry, room in zip(asked, rooms, strict=True) if room > 0]
        if not ready:
            return {}, hold
        room = np.array([room for room in rooms if room > 0], np.int32)
        ids = admission_ids[[i for i, _ in ready]].astype(np.int64)
        if made is None:
            guesses = self._call_proposer([drafted for _, drafted in ready], room, ids)
        else:
            guesses = self._place_drafts(ready, room, ids, made)
        drafts: dict[int, Ints] = {}
        for (i, drafted), tokens in zip(ready, guesses, strict=True):
            was_held, drafted.is_held = drafted.is_held, False
            if int(admission_ids[i]) in busy:
                # The first draft is of the token in flight; without another there is no gain.
                drafted.is_held = len(tokens) > 1
                hold[i] = drafted.is_held
            elif len(tokens):
                drafts[i] = tokens
            elif was_held:
                drafted.count_hits(0)  # no draft was proposed, so holding it back was wasted
        return drafts, hold

    def _place_drafts(
        self, rows: Sequence[tuple[int, DraftHistory]], room: Ints, ids: Ints, made: MadeDrafts
    ) -> list[Ints]:
        """Return the drafts that the model makes: -1 for each, as the device has them.

        Masks follow drafts, so rows of a grammar have their tokens.

        room: [rows] int32    ids: [rows] int64
        """
        places: list[Ints] = []
        values: Ints | None = None
        for (i, _), count, admission_id in zip(rows, room.tolist(), ids.tolist(), strict=True):
            if self.tracker.by_admission_id[admission_id].followed is None:
                places.append(np.full(count, -1, np.int32))
                continue
            values = made.read() if values is None else values
            places.append(values[i, :count])
        return places

    def end_rows(self) -> None:
        """Tell the proposer which rows are over.

        raises: PluginBroken, naming the proposer, when it raises
        """
        ended = [each for each in self.asked_ids if each not in self.tracker.by_admission_id]
        if ended:
            self.asked_ids.difference_update(ended)
            self._blame(self.proposer.end, np.array(sorted(ended), np.int64))

    def close(self) -> None:
        """Free what the proposer has."""
        self.proposer.close()

    def _blame(self, call: Callable[..., object], *arguments: object) -> object:
        """Call the proposer.   raises: PluginBroken, naming it, when it raises"""
        try:
            return call(*arguments)
        except (Exception, SystemExit) as error:
            raise PluginBroken(
                f"the proposer {self.name!r} raised {describe_error(error)}; {_BLAME}"
            ) from error

    def _call_proposer(self, rows: Sequence[DraftHistory], room: Ints, ids: Ints) -> list[Ints]:
        """Return the proposer's drafts for each of the rows.

        room: [rows] int32    ids: [rows] int64
        raises: PluginBroken, naming the proposer, when it raises or breaks a rule
        """
        tokens = [drafted.tokens[: drafted.length] for drafted in rows]
        for array in (*tokens, room, ids):
            array.setflags(write=False)
        self.asked_ids.update(ids.tolist())
        answer: Any = self._blame(self.proposer.propose, tokens, room, ids)
        fault = find_proposal_fault(answer, room, self.vocab)
        if fault:
            raise PluginBroken(f"the proposer {self.name!r} returned {fault}; {_BLAME}")
        counts, drafts = answer
        return np.split(drafts.astype(np.int32), np.cumsum(counts)[:-1])


def make_drafting(parts: EngineBuild, tracker: OutputTracker) -> Drafting | None:
    """Make the drafting of an engine's requests; None without a proposer."""
    selected = parts.parts.proposer
    if selected is None:
        return None
    return Drafting(
        selected.proposer,
        selected.spec.name,
        parts.limits,
        parts.model.vocab,
        STEP_TOKENS[parts.env.device],
        tracker,
        selected.spec.by_model,
    )


_BLAME = "report it to its author or leave out proposer (--proposer)"


def find_proposal_fault(answer: object, room: Ints, vocab: int) -> str:
    """Describe what is wrong with a proposer's answer; empty when nothing is."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"a wrong answer: expected counts and drafts, got {shorten(answer)}"
    for array in answer:
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            return f"a wrong answer: expected flat arrays of integers, got {shorten(array)}"
    counts, drafts = answer
    if len(counts) != len(room):
        return f"{len(counts)} counts for {len(room)} rows"
    if (counts < 0).any() or (counts > room).any():
        row = int(((counts < 0) | (counts > room)).nonzero()[0][0])
        return f"{counts[row]} drafts for a row with room for {room[row]}"
    if int(counts.sum()) != len(drafts):
        return f"{len(drafts)} drafts where its counts say {int(counts.sum())}"
    if len(drafts) and (int(drafts.min()) < 0 or int(drafts.max()) >= vocab):
        wrong = int(drafts.min()) if int(drafts.min()) < 0 else int(drafts.max())
        return f"the token {wrong}, which is not in the vocabulary of {vocab}"
    return ""
