"""The matchers of running requests, and the masks that they give a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
from attrs import define, frozen

from headstock.errors import PLUGIN_FAILURES, RequestError, describe_error, shorten
from headstock.grammar.compiler import GrammarCompiler
from headstock.grammar.delayed import DelayedMatcher
from headstock.logs import log_event
from headstock.scheduler import Outcome, Plan, Request
from headstock.spi import GrammarEngine, Matcher
from headstock.spi.arrays import Ints
from headstock.structured_outputs import PARAMETER

LOG = logging.getLogger(__name__)


@define(eq=False)
class FollowedRequest:
    """A request whose answer follows a grammar.

    end_ids: the tokens that may end it, where the grammar allows an end
    failure: why it cannot be followed any further; empty while it can
    """

    request: Request
    matcher: Matcher
    end_ids: Ints
    failure: str = ""


class AdmittedRequest(Protocol):
    """A request that has been admitted.   followed: None where no grammar rules its answer"""

    @property
    def followed(self) -> FollowedRequest | None: ...


class AdmittedRequests(Protocol):
    """The live requests by their latest admission; the engine's thread alone changes them.

    num_followed: how many live requests follow a grammar
    """

    @property
    def num_followed(self) -> int: ...
    @property
    def by_admission_id(self) -> Mapping[int, AdmittedRequest]: ...


@frozen
class _NoRequests:
    num_followed: int = 0
    by_admission_id: Mapping[int, AdmittedRequest] = MappingProxyType({})


NO_REQUESTS: AdmittedRequests = _NoRequests()


@frozen(eq=False)
class GrammarMasks:
    """The masks of a plan's logits that a grammar rules, still to be filled.

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
    """Follows the answers that a grammar rules, and masks what they may not continue with.

    Any thread may check and start requests. The thread that runs steps calls `plan_masks` and what
    that returns, the engine's thread all else. A request is never in a step while its last token
    is on its way, so the two never use one matcher at the same time.
    """

    def __init__(self, compiler: GrammarCompiler, vocab: int, admitted: AdmittedRequests) -> None:
        self.compiler = compiler
        self.vocab = vocab
        self.admitted = admitted

    def check_request(self, request: Request) -> None:
        """Raise RequestError when the grammar of a request's answer cannot be served."""
        params = request.params
        label = params.structured_outputs.label
        # All at once, and before the tokens that end it, which one of them takes away.
        excluded = {name: rule for name, rule in _EXCLUDED.items() if getattr(params, name)}
        if excluded:
            raise RequestError(
                f"{' and '.join(excluded)} cannot be combined with {label}: "
                f"{', and '.join(excluded.values())}; leave {' and '.join(excluded)} out",
                next(iter(excluded)),
            )
        if not self._list_end_ids(request):
            raise RequestError(
                f"{label} needs a token that ends an answer, and the model has none; give "
                "stop_token_ids",
                PARAMETER,
            )
        self.compiler.compile(params.structured_outputs)

    def start(self, request: Request) -> FollowedRequest:
        """Begin to follow the answer of a request.   raises: RequestError"""
        outputs = request.params.structured_outputs
        matcher = self.compiler.compile(outputs).start()
        if outputs.after_reasoning is not None:
            matcher = DelayedMatcher(matcher, outputs.after_reasoning, self._list_end_ids(request))
        return FollowedRequest(request, matcher, np.array(self._list_end_ids(request), np.int64))

    def _list_end_ids(self, request: Request) -> list[int]:
        """The tokens that end the request; a tokenizer may have more ids than there are scores."""
        return [token for token in request.stop_ids if 0 <= token < self.vocab]

    def advance(self, outcome: Outcome) -> None:
        """Follow the tokens that a step accepted, before other admissions replace theirs."""
        if not self.admitted.num_followed:
            return
        stop = 0
        for admission_id, count in zip(
            outcome.accepted_ids.tolist(), outcome.accepted_counts.tolist(), strict=True
        ):
            start, stop = stop, stop + count
            request = self.admitted.by_admission_id.get(admission_id)
            if request is not None and request.followed is not None:
                self._follow(request.followed, outcome.accepted_tokens[start:stop])

    def explain_failure(self, admission_id: int) -> str:
        """Explain why an answer cannot be followed any further; empty while it can."""
        request = self.admitted.by_admission_id.get(admission_id)
        return "" if request is None or request.followed is None else request.followed.failure

    def plan_masks(self, plan: Plan) -> GrammarMasks | None:
        """Find the plan's logits that a grammar masks; None without any."""
        if not self.admitted.num_followed:
            return None
        found: list[int] = []
        followed: list[FollowedRequest] = []
        for at, (admission_id, samples) in enumerate(
            zip(plan.admission_ids.tolist(), plan.samples.tolist(), strict=True)
        ):
            request = self.admitted.by_admission_id.get(admission_id) if samples else None
            if request is not None and request.followed is not None:
                found.append(at)
                followed.append(request.followed)
        if not found:
            return None
        lasts = plan.last_logits[found].astype(np.int64)
        if not len(plan.drafts):
            return GrammarMasks(self, lasts, [(each, plan.drafts) for each in followed])
        columns = (plan.num_drafts[found], np.cumsum(plan.num_drafts)[found], lasts)
        logits: list[int] = []
        drafts: list[Ints] = []
        for count, stop, last in zip(*(column.tolist() for column in columns), strict=True):
            drafts.append(plan.drafts[stop - count : stop])
            logits += range(last - count, last + 1)
        pairs = list(zip(followed, drafts, strict=True))
        return GrammarMasks(self, np.array(logits, np.int64), pairs)

    def fill(self, followed: Sequence[tuple[FollowedRequest, Ints]], masks: np.ndarray) -> None:
        """Fill the masks of a step; a request that cannot be followed gets no token and so fails.

        writes: masks [m, words] int32
        """
        firsts = np.cumsum([0, *(len(drafts) + 1 for _, drafts in followed[:-1])])
        # What comes first is the plugin's to write, and allows nothing until then. What follows a
        # draft that is not allowed stays free: that draft is rejected anyway.
        if len(followed) < len(masks):
            masks.fill(-1)
            masks[firsts] = 0
        else:
            masks.fill(0)
        matchers = [(each.matcher, drafts) for each, drafts in followed]
        try:
            results = _check_results(_fill_masks(self.compiler.engine, matchers, masks), matchers)
        # Of one of them, or of all: no row may get a token that its grammar does not allow.
        except PLUGIN_FAILURES as error:
            results = [error] * len(matchers)
        ends: list[tuple[int, Ints]] = []
        for (each, drafts), first, result in zip(followed, firsts.tolist(), results, strict=True):
            if isinstance(result, BaseException):
                self._fail(each, result)
            if each.failure or isinstance(result, BaseException):
                masks[first : first + len(drafts) + 1] = 0
                continue
            ends += ((first + at, each.end_ids) for at, may_end in enumerate(result) if may_end)
        _allow_tokens(masks, ends)
        # One call for all: numpy takes microseconds a call, and a step may have hundreds of rows.
        is_possible = np.any(masks, axis=1)[firsts]
        for at in (~is_possible).nonzero()[0].tolist():
            self._fail(followed[at][0], ValueError("no token may follow, and the text may not end"))

    def _follow(self, followed: FollowedRequest, tokens: Ints) -> None:
        """Advance a matcher by accepted tokens."""
        # A token that ends the request is none of the text, and then the request has ended.
        try:
            count = followed.matcher.advance(tokens)
            if isinstance(count, bool) or not 0 <= count <= len(tokens):
                raise TypeError(f"advance returned {shorten(count)} for {len(tokens)} tokens")
            if count < len(tokens):
                raise ValueError(f"token {int(tokens[count])} is not allowed there")
        except PLUGIN_FAILURES as error:
            self._fail(followed, error)
            return
        # What was accepted is never taken back, so the delay is over for good.
        if isinstance(followed.matcher, DelayedMatcher) and followed.matcher.has_begun:
            followed.matcher = followed.matcher.matcher

    def _fail(self, followed: FollowedRequest, error: BaseException) -> None:
        """Note why a request cannot be followed any further; its next step has no token for it."""
        if followed.failure:
            return
        # A ValueError is how the contract says that a limit is reached.
        reason = str(error) if isinstance(error, ValueError) else describe_error(error)
        said = "says" if isinstance(error, ValueError) else "raised"
        followed.failure = (
            f"the grammar of this answer cannot be followed any further: the grammar plugin "
            f"{self.compiler.name!r} {said} {shorten(reason, 200)}"
        )
        LOG.error(
            log_event(
                "an answer cannot be followed",
                request=followed.request.id,
                reason=shorten(reason, 200),
                plugin=self.compiler.name,
            )
        )

    def close(self) -> None:
        """End what compiles."""
        self.compiler.close()


_EXCLUDED = {
    "ignore_eos": "an answer that follows a grammar must be able to end",
    "min_tokens": "it may forbid the end where the grammar allows nothing else",
    "allowed_token_ids": "the two may have no token in common",
}
"""Parameters that contradict a grammar -> why."""


def _allow_tokens(masks: np.ndarray, allowed: Sequence[tuple[int, Ints]]) -> None:
    """Allow tokens in some of the masks, each with its index.

    writes: masks [m, words] int32
    """
    if not allowed:
        return
    ids = np.concatenate([ids for _, ids in allowed])
    rows = np.repeat([row for row, _ in allowed], [len(ids) for _, ids in allowed])
    bits = (1 << (ids % 32)).astype(np.uint32)
    np.bitwise_or.at(masks.view(np.uint32), (rows, ids // 32), bits)


def _fill_masks(
    engine: GrammarEngine, matchers: Sequence[tuple[Matcher, Ints]], masks: np.ndarray
) -> Sequence[tuple[bool, ...] | BaseException]:
    """Fill the masks as `GrammarEngine.fill_masks` does.   writes: masks [m, words] int32"""
    delayed = [isinstance(matcher, DelayedMatcher) for matcher, _ in matchers]
    if not any(delayed):
        return engine.fill_masks(matchers, masks)
    # The engine may know its own matchers alone. The contract's default knows any.
    is_row_delayed = np.repeat(delayed, [len(drafts) + 1 for _, drafts in matchers])
    results: list[Iterator[tuple[bool, ...] | BaseException]] = []
    for flag, fill in (
        (False, engine.fill_masks),
        (True, partial(GrammarEngine.fill_masks, engine)),
    ):
        own = [pair for pair, each in zip(matchers, delayed, strict=True) if each is flag]
        part = masks[is_row_delayed == flag]
        results.append(iter(fill(own, part) if own else ()))
        masks[is_row_delayed == flag] = part
    return [next(results[flag]) for flag in delayed]


def _check_results(
    results: object, matchers: Sequence[tuple[Matcher, Ints]]
) -> list[tuple[bool, ...] | BaseException]:
    """An engine's answers, with an error instead of each missing one.

    raises: TypeError when they are not one for each matcher
    """
    if not isinstance(results, list | tuple) or len(results) != len(matchers):
        raise TypeError(f"fill_masks returned {shorten(results)} for {len(matchers)} matchers")
    checked: list[tuple[bool, ...] | BaseException] = []
    for result, (_, drafts) in zip(results, matchers, strict=True):
        is_answer = (
            isinstance(result, tuple)
            and 1 <= len(result) <= len(drafts) + 1
            and all(isinstance(may_end, bool | np.bool_) for may_end in result)
        )
        checked.append(
            result
            if is_answer or isinstance(result, ValueError)
            else TypeError(
                f"fill_masks returned {shorten(result)} for a matcher with {len(drafts)} drafts"
            )
        )
    return checked
