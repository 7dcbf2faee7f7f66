"""From rows and admission ids back to requests: which tokens each request gets next."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from attrs import define, field

from headstock.engine.in_flight import NOT_FINITE, InFlightStep
from headstock.engine.tracked_request import TrackedRequest
from headstock.execution.abstract_executor import Pending
from headstock.outputs import TokenLogprob, Update
from headstock.scheduler import (
    Ended,
    Limits,
    Outcome,
    Plan,
    RowCounter,
    State,
    count_held_pages,
)
from headstock.spi import Sample
from headstock.spi.arrays import Ints

UNEXPLAINED = "the step of this request failed; the log has the reason"
NO_ERRORS: Mapping[int, str] = MappingProxyType({})


@define
class OutputTracker:
    """The live requests, by id and by their latest admission id, and counts since the start.

    awaiting_token: those of `by_admission_id` whose next token is an update. All others cost
        nothing until they end.
    num_streams, num_ended_streams: requests whose tokens are read one by one, live and ended
    num_followed: live requests whose answers follow a grammar
    num_unadmitted: requests that were never admitted; their prompts take `unadmitted_pages`,
        [groups] int64
    """

    requests: dict[str, TrackedRequest] = field(factory=dict)
    by_admission_id: dict[int, TrackedRequest] = field(factory=dict)
    awaiting_token: dict[int, TrackedRequest] = field(factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0
    not_finite: int = 0
    executed_steps: int = 0
    replayed_steps: int = 0
    peak_held_pages: int = 0
    num_streams: int = 0
    num_ended_streams: int = 0
    num_followed: int = 0
    num_unadmitted: int = 0
    unadmitted_pages: Ints = field(factory=lambda: np.zeros(1, np.int64))

    def add_request(self, tracked: TrackedRequest) -> None:
        """Track a request that arrived."""
        self.requests[tracked.request.id] = tracked
        self.num_unadmitted += 1
        self.num_streams += tracked.stream_tokens
        self.num_followed += tracked.followed is not None
        self.unadmitted_pages = self.unadmitted_pages + tracked.prompt_pages

    def count_step(self, pending: Pending) -> None:
        """Count a step that the device has run."""
        self.executed_steps += 1
        self.replayed_steps += pending.is_replayed

    def has_request(self, id: str) -> bool:
        """Whether a live request has this id."""
        return id in self.requests

    def track_admissions(self, plan: Plan, state: State, limits: Limits) -> None:
        """Note the admission ids that the plan gave out, and the peak of held pages."""
        self.peak_held_pages = max(self.peak_held_pages, count_held_pages(state, limits))
        for row in plan.new_row_ids.tolist():
            entry = state.requests_by_row[row]
            assert entry is not None, f"internal error: row {row} was admitted without a request"
            tracked = self.requests[entry.request.id]
            self.clear_admission(tracked)  # a preempted request was admitted before
            tracked.admission_id = int(state.row_counters[RowCounter.ADMISSION_ID, row])
            self.by_admission_id[tracked.admission_id] = tracked
            if tracked.stream_tokens or not tracked.num_emitted:
                self.awaiting_token[tracked.admission_id] = tracked
            # At the first admission only: later a preempted request finds its own pages again.
            if tracked.cached_tokens is None:
                tracked.cached_tokens = int(state.row_counters[RowCounter.NUM_CACHED, row])
                tracked.queue_seconds = time.monotonic() - tracked.arrival
                self._count_admitted(tracked)

    def _count_admitted(self, tracked: TrackedRequest) -> None:
        """Remove a request from the counts of those that were never admitted."""
        self.num_unadmitted -= 1
        self.unadmitted_pages = self.unadmitted_pages - tracked.prompt_pages

    def clear_admission(self, tracked: TrackedRequest) -> None:
        """Remove the request from the maps by admission id."""
        self.by_admission_id.pop(tracked.admission_id, None)
        self.awaiting_token.pop(tracked.admission_id, None)

    def collect(self, step: InFlightStep | None, outcome: Outcome) -> tuple[Update, ...]:
        """Collect the updates of requests that go on after a step.

        The last update of a request that has ended takes its last tokens.
        """
        self.output_tokens += len(outcome.accepted_tokens)
        if step is not None and step.sample is not None:
            if step.sample.logprobs is not None:
                self._add_prompt_logprobs(step.plan, step.sample)
                self._add_logprobs(step.plan, step.sample, outcome)
            if step.sample.pooled is not None:
                self._add_embeddings(step.plan, step.sample.pooled.numpy())
        updates: list[Update] = []
        # A request that is not streamed costs nothing for a token. With an object for each token, a
        # step of 256 requests took 720-880 us instead of 220-240 (a model that computes nothing).
        if not self.awaiting_token:
            return ()
        has_ended = {ended.admission_id for ended in outcome.ended}
        # As a list at once: of 256 updates, 460 us, slices of an array take 60 us.
        tokens, stop = outcome.accepted_tokens.tolist(), 0
        for admission_id, count in zip(
            outcome.accepted_ids.tolist(), outcome.accepted_counts.tolist(), strict=True
        ):
            start, stop = stop, stop + count
            tracked = self.awaiting_token.get(admission_id)
            if tracked is None or admission_id in has_ended:
                continue
            updates.append(tracked.make_update(tokens[start:stop]))
            if not tracked.stream_tokens and tracked.num_emitted:
                del self.awaiting_token[admission_id]
        return tuple(updates)

    def finish_requests(
        self, ended: Sequence[Ended], errors: Mapping[int, str] = NO_ERRORS
    ) -> tuple[Update, ...]:
        """Stop tracking requests that ended, and make their last updates.

        errors: by admission id, why requests failed
        """
        return tuple([self._finish_request(each, errors) for each in ended])

    def _finish_request(self, ended: Ended, errors: Mapping[int, str]) -> Update:
        """Stop tracking a request and make its last update."""
        tracked = self.requests.pop(ended.id)
        self.clear_admission(tracked)
        self.num_streams -= tracked.stream_tokens
        self.num_ended_streams += tracked.stream_tokens
        self.num_followed -= tracked.followed is not None
        if tracked.cached_tokens is None:
            self._count_admitted(tracked)
        self.prompt_tokens += len(tracked.request.prompt)
        self.cached_tokens += tracked.cached_tokens or 0
        error = errors.get(ended.admission_id, UNEXPLAINED) if ended.reason == "error" else None
        self.failed += error is not None
        self.not_finite += error == NOT_FINITE
        return tracked.make_last_update(
            ended.tokens,
            ended.reason,
            preemptions=ended.preemptions,
            stop_token=int(ended.tokens[-1])
            if ended.reason == "stop" and not tracked.request.pooling
            else None,
            error=error,
        )

    def make_final_updates(self, state: State) -> list[Update]:
        """Make the last update of every live request, with the tokens that are known so far."""
        tokens = {entry.request.id: entry.tokens for entry in state.waiting}
        for row, entry in enumerate(state.requests_by_row):
            if entry is not None:
                tokens[entry.request.id] = state.tokens[
                    row, : state.row_counters[RowCounter.NUM_KNOWN, row]
                ]
        return [
            tracked.make_last_update(tokens.get(id, tracked.request.prompt), "abort")
            for id, tracked in self.requests.items()
        ]

    def _add_prompt_logprobs(self, plan: Plan, sample: Sample) -> None:
        """Store the log-probabilities of prompt tokens that follow a scored position."""
        logprobs = _logprob_arrays(sample)
        logit_ends = np.cumsum(plan.num_logits).tolist()
        for i in np.flatnonzero(plan.num_logits).tolist():
            tracked = self.by_admission_id.get(int(plan.admission_ids[i]))
            if tracked is None or not tracked.request.prompt_logprobs:
                continue
            prompt, most = tracked.request.prompt, tracked.request.params.prompt_logprobs
            end, stop = logit_ends[i], int(plan.stops[i])
            for at in range(end - int(plan.num_logits[i]), end):
                following = stop - (end - at) + 1
                if following < len(prompt):
                    tracked.prompt_logprobs[following] = _token_logprob(
                        logprobs, at, int(prompt[following]), most
                    )

    def _add_embeddings(self, plan: Plan, pooled: np.ndarray) -> None:
        """Store the vectors of prompts that end in the plan's step.

        pooled: [pooled rows, hidden] float32
        """
        rows = plan.pooled_rows
        for i in np.flatnonzero(plan.pooling[rows] == 2).tolist():
            tracked = self.by_admission_id.get(int(plan.admission_ids[rows[i]]))
            if tracked is not None:
                tracked.embedding = tuple(pooled[i].tolist())

    def _add_logprobs(self, plan: Plan, sample: Sample, outcome: Outcome) -> None:
        """Store the requested log-probabilities of sampled tokens that the scheduler accepted."""
        logprobs, tokens = _logprob_arrays(sample), sample.tokens.numpy()
        # The first of a row's sampled tokens comes from the logits before its drafts.
        first = plan.last_logits
        if len(plan.num_drafts):
            first = first - plan.num_drafts
        logits = dict(zip(plan.admission_ids.tolist(), first.tolist(), strict=True))
        for admission_id, count in zip(
            outcome.accepted_ids.tolist(), outcome.accepted_counts.tolist(), strict=True
        ):
            tracked = self.by_admission_id[admission_id]
            most = tracked.request.params.logprobs
            if most is not None:
                at = logits[admission_id]
                tracked.logprobs += [
                    _token_logprob(logprobs, i, int(tokens[i]), most) for i in range(at, at + count)
                ]


_LogprobArrays = tuple[np.ndarray, Ints, np.ndarray, Ints]
"""[n] float32 logprobs, [n, k] top_ids, [n, k] float32 top_logprobs, [n] ranks."""


def _logprob_arrays(sample: Sample) -> _LogprobArrays:
    """View the log-probabilities of a sample as arrays: one entry of a tensor takes far longer."""
    assert (
        sample.logprobs is not None
        and sample.top_ids is not None
        and sample.top_logprobs is not None
        and sample.ranks is not None
    )
    parts = (sample.logprobs, sample.top_ids, sample.top_logprobs, sample.ranks)
    logprobs, top_ids, top_logprobs, ranks = (part.numpy() for part in parts)
    return logprobs, top_ids, top_logprobs, ranks


def _token_logprob(arrays: _LogprobArrays, at: int, token: int, most: int) -> TokenLogprob:
    """Make the log-probability of one logit position, with `most` alternatives.

    A batch computes the most alternatives that any of its rows asks for.
    """
    logprobs, top_ids, top_logprobs, ranks = arrays
    top = zip(top_ids[at, :most].tolist(), top_logprobs[at, :most].tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[at]), tuple(top), int(ranks[at]))
