"""The matchers of running requests, and the masks that they give a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from attrs import define, frozen

from headstock.errors import RequestError, describe_error, shorten
from headstock.grammar.compiler import GrammarCompiler
from headstock.grammar.delayed import DelayedMatcher
from headstock.logs import log_event
from headstock.scheduler import Plan, Request, RowCounter, State
from headstock.spi import GrammarEngine, Matcher
from headstock.spi.arrays import Ints
from headstock.structured_outputs import PARAMETER

LOG = logging.getLogger(__name__)


@define(eq=False)
class FollowedRequest:
    """A request whose answer has a form.

    end_ids: the tokens that may end it, where the form allows an end
    failure: why it cannot be followed any further; empty while it can
    """

    request: Request
    matcher: Matcher
    end_ids: Ints
    failure: str = ""


@frozen(eq=False)
class PlannedMasks:
    """The masks of a plan's logits that a form rules, still to be filled.

    logits: [m] int64, which of the plan's logits
    followed: each with the drafts of its next tokens, [k] int32; k + 1 logits each
    """

    rows: GrammarRows
    logits: Ints
    followed: Sequence[tuple[FollowedRequest, Ints]]

    def fill(self, masks: np.ndarray) -> None:
        """Fill the masks.   writes: masks [m, words] int32"""
        self.rows.fill(self.followed, masks)


class GrammarRows:
    """The requests whose answers have a form, by id and by their latest admission.

    Any thread may check and add requests. The thread that runs steps calls `plan_masks` and what
    that returns, the engine's thread all else. A request is never in a step while its last token
    is on its way, so the two never use one matcher at the same time.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self.requests: dict[str, FollowedRequest] = {}
        self.by_admission_id: dict[int, FollowedRequest] = {}

    def check_request(self, request: Request) -> None:
        """Raise RequestError when the form of a request's answer cannot be served."""
        params = request.params
        if not request.stop_ids:
            raise RequestError(
                f"{PARAMETER} needs a token that ends an answer, and the model has none or "
                "ignore_eos is set; give stop_token_ids or leave ignore_eos out",
                PARAMETER,
            )
        for name, rule in _EXCLUDED.items():
            if getattr(params, name):
                raise RequestError(
                    f"{name} cannot be combined with {PARAMETER}: {rule}; leave out one of the two",
                    name,
                )
        self.compiler.compile(params.structured_outputs)

    def add_request(self, request: Request) -> None:
        """Follow a request that arrives.   raises: RequestError"""
        form = request.params.structured_outputs
        matcher = self.compiler.compile(form).start()
        if form.after_reasoning is not None:
            matcher = DelayedMatcher(matcher, form.after_reasoning, request.stop_ids)
        self.requests[request.id] = FollowedRequest(
            request, matcher, np.array(request.stop_ids, np.int64)
        )

    def drop_request(self, request_id: str) -> None:
        """Let go of a request that is to end, unless it runs; unknown ids are ignored."""
        if all(each.request.id != request_id for each in self.by_admission_id.values()):
            self.requests.pop(request_id, None)

    def track_admissions(self, plan: Plan, state: State) -> None:
        """Note the admission ids that the plan gave out."""
        if not self.requests:
            return
        for row in plan.new_row_ids.tolist():
            entry = state.requests_by_row[row]
            followed = None if entry is None else self.requests.get(entry.request.id)
            if followed is not None:
                admission_id = int(state.row_counters[RowCounter.ADMISSION_ID, row])
                self.by_admission_id[admission_id] = followed

    def advance(self, state: State) -> None:
        """Follow the tokens that the last step accepted, and let requests go that ended."""
        if not self.requests:
            return
        for ended in state.ended:
            if self.requests.pop(ended.id, None) is not None:
                self.by_admission_id = {
                    number: each
                    for number, each in self.by_admission_id.items()
                    if each.request.id != ended.id
                }
        stop = 0
        for admission_id, count in zip(
            state.accepted_ids.tolist(), state.accepted_counts.tolist(), strict=True
        ):
            start, stop = stop, stop + count
            followed = self.by_admission_id.get(admission_id)
            if followed is not None:
                self._follow(followed, state.accepted_tokens[start:stop])

    def plan_masks(self, plan: Plan) -> PlannedMasks | None:
        """Find the plan's logits that a form rules; None when there are none."""
        if not self.by_admission_id:
            return None
        num_drafts = plan.num_drafts if len(plan.num_drafts) else np.zeros_like(plan.rows)
        draft_stops = np.cumsum(num_drafts)
        last_logits = plan.last_logits
        logits: list[int] = []
        followed: list[tuple[FollowedRequest, Ints]] = []
        for i in plan.samples.nonzero()[0].tolist():
            answer = self.by_admission_id.get(int(plan.admission_ids[i]))
            if answer is None:
                continue
            count, stop = int(num_drafts[i]), int(draft_stops[i])
            followed.append((answer, plan.drafts[stop - count : stop]))
            last = int(last_logits[i])
            logits += range(last - count, last + 1)
        return PlannedMasks(self, np.array(logits, np.int64), followed) if followed else None

    def fill(self, followed: Sequence[tuple[FollowedRequest, Ints]], masks: np.ndarray) -> None:
        """Fill the masks of a step; a request that cannot be followed gets no token and so fails.

        writes: masks [m, words] int32
        """
        masks[:] = -1
        matchers = [(each.matcher, drafts) for each, drafts in followed]
        try:
            results = list(_fill_masks(self.compiler.engine, matchers, masks))
            if len(results) != len(matchers):
                raise ValueError(f"fill_masks returned {len(results)} of {len(matchers)} answers")
        # Of one of them, or of all: no row may get a token that its form does not allow.
        except Exception as error:
            results = [ValueError(describe_error(error))] * len(matchers)
        at = 0
        for (each, drafts), result in zip(followed, results, strict=True):
            own = masks[at : at + len(drafts) + 1]
            at += len(own)
            if not isinstance(result, tuple) or each.failure:
                self._fail(each, each.failure or _describe_failure(result))
                own[:] = 0
                continue
            for mask, may_end in zip(own, result, strict=False):
                if may_end:
                    np.bitwise_or.at(
                        mask.view(np.uint32),
                        each.end_ids // 32,
                        (1 << (each.end_ids % 32)).astype(np.uint32),
                    )

    def _follow(self, followed: FollowedRequest, tokens: Ints) -> None:
        """Advance a matcher by accepted tokens."""
        # A token that ends the request is none of the text, and then the request has ended.
        try:
            count = followed.matcher.advance(tokens)
            if count < len(tokens):
                self._fail(followed, f"token {int(tokens[count])} is not allowed there")
        except Exception as error:
            self._fail(followed, describe_error(error))
            return
        # What was accepted is never taken back, so the form is followed without the delay from
        # here.
        if isinstance(followed.matcher, DelayedMatcher) and followed.matcher.has_begun:
            followed.matcher = followed.matcher.matcher

    def _fail(self, followed: FollowedRequest, reason: str) -> None:
        """Note why a request cannot be followed any further; its next step has no token for it."""
        if not followed.failure:
            followed.failure = reason
            LOG.error(
                log_event(
                    "an answer cannot be followed",
                    request=followed.request.id,
                    plugin=self.compiler.name,
                    reason=shorten(reason, 200),
                )
            )

    def close(self) -> None:
        """Let go of all requests, and end what compiles."""
        self.requests.clear()
        self.by_admission_id = {}
        self.compiler.close()


_EXCLUDED = {
    "ignore_eos": "an answer of a given form must be able to end",
    "min_tokens": "it may forbid the end where the form allows nothing else",
    "allowed_token_ids": "the two may have no token in common",
}
"""Parameters that contradict a form -> why."""


def _fill_masks(
    engine: GrammarEngine, matchers: Sequence[tuple[Matcher, Ints]], masks: np.ndarray
) -> list[tuple[bool, ...] | ValueError]:
    """Fill the masks as `GrammarEngine.fill_masks` does.   writes: masks [m, words] int32"""
    delayed = [isinstance(matcher, DelayedMatcher) for matcher, _ in matchers]
    if not any(delayed):
        return engine.fill_masks(matchers, masks)
    # The engine may know its own matchers alone. The contract's default knows any.
    is_row_delayed = np.repeat(delayed, [len(drafts) + 1 for _, drafts in matchers])
    results: list[Iterator[tuple[bool, ...] | ValueError]] = []
    for flag, fill in (
        (False, engine.fill_masks),
        (True, partial(GrammarEngine.fill_masks, engine)),
    ):
        own = [pair for pair, each in zip(matchers, delayed, strict=True) if each is flag]
        part = masks[is_row_delayed == flag]
        results.append(iter(fill(own, part) if own else ()))
        masks[is_row_delayed == flag] = part
    return [next(results[flag]) for flag in delayed]


def _describe_failure(result: object) -> str:
    """Why the masks of an answer were not filled."""
    if isinstance(result, Exception):
        return str(result) or describe_error(result)
    return f"fill_masks returned {shorten(result)}"
