"""Who is owed which tokens: from rows and admission numbers back to requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field

from headstock.execution.executor import Outcome
from headstock.outputs import TokenLogprob, Update
from headstock.scheduler import Accepted, Ended, Limits, Plan, Request, RowCounter, State, num_held
from headstock.spi.arrays import Ints


@define(eq=False)
class Account:
    """One live request: the admission number of its last seat, how many of its output tokens have
    been told, and the scores that have not.

    `stream_tokens`: it is told of every token; otherwise of the first one, and of the rest when
    it ends.
    `pages`: those that its prompt takes
    """

    request: Request
    stream_tokens: bool
    pages: int
    order: int = 0
    told: int = 0
    cached: int | None = None
    scores: list[TokenLogprob] = field(factory=list)
    prompt_scores: dict[int, TokenLogprob] = field(factory=dict)

    def tell(self, tokens: Ints, **end: Any) -> Update:
        """News of `tokens`, [n] int32, the next that are untold, and of how the request ended, if
        it did.
        """
        news: dict[str, Any] = {"id": self.request.id, "tokens": tuple(tokens.tolist()), **end}
        if len(tokens) and not self.told:
            news["cached_tokens"] = self.cached
            if self.request.prompt_logprobs:
                news["prompt_logprobs"] = tuple(
                    map(self.prompt_scores.get, range(len(self.request.prompt)))
                )
        if self.scores:
            news["logprobs"], self.scores = tuple(self.scores), []
        self.told += len(tokens)
        return Update(**news)

    def tell_last(self, tokens: Ints, reason: str, **end: Any) -> Update:
        """The last news, `tokens` being all that the request came to, prompt and output.

        tokens: [n] int32
        """
        return self.tell(
            tokens[len(self.request.prompt) + self.told :], finish_reason=reason, **end
        )


@define
class Ledger:
    """The live requests, by id and by the admission number of the seat they have, and counts since
    the start.

    `awaited` are those of `by_order` whose next token is told as soon as it is known: no other
    costs anything until it ends. `unseated` requests never had a seat yet, and their prompts will
    take `unseated_pages`.
    """

    accounts: dict[str, Account] = field(factory=dict)
    by_order: dict[int, Account] = field(factory=dict)
    awaited: dict[int, Account] = field(factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0
    peak_held_pages: int = 0
    unseated: int = 0
    unseated_pages: int = 0

    def open(self, request: Request, *, stream_tokens: bool, pages: int) -> None:
        """Start an account."""
        self.accounts[request.id] = Account(request, stream_tokens, pages)
        self.unseated += 1
        self.unseated_pages += pages

    def knows(self, id: str) -> bool:
        """Whether a live request has this id."""
        return id in self.accounts

    def seat(self, plan: Plan, state: State, limits: Limits) -> None:
        """Note the admission numbers that the plan gave out, and the pages that are held."""
        self.peak_held_pages = max(self.peak_held_pages, num_held(state, limits))
        for row in plan.joined.tolist():
            entry = state.seats[row]
            assert entry is not None, f"row {row} joined without a request"
            account = self.accounts[entry.request.id]
            self.unseat(account)  # a preempted request had a seat before
            account.order = int(state.row_counters[RowCounter.ADMISSION_ID, row])
            self.by_order[account.order] = account
            if account.stream_tokens or not account.told:
                self.awaited[account.order] = account
            if account.cached is None:  # what a preempted request finds later is its own
                account.cached = int(state.row_counters[RowCounter.NUM_CACHED, row])
                self.leave(account)

    def leave(self, account: Account) -> None:
        """Count a request no more among those that never had a seat."""
        self.unseated -= 1
        self.unseated_pages -= account.pages

    def unseat(self, account: Account) -> None:
        """Forget the admission number of the account's last seat."""
        self.by_order.pop(account.order, None)
        self.awaited.pop(account.order, None)

    def settle(
        self, plan: Plan | None, outcome: Outcome | None, state: State
    ) -> tuple[Update, ...]:
        """What is to be told of the step that ran `plan` and led to `state`."""
        accepted = state.accepted
        self.output_tokens += len(accepted.tokens)
        if plan is not None and outcome is not None and outcome.logprobs is not None:
            self.note_prompt_scores(plan, outcome)
            self.note_scores(plan, outcome, accepted)
        last = [self.close(ended) for ended in state.ended]
        return (*self.next_tokens(accepted), *last)

    def next_tokens(self, accepted: Accepted) -> list[Update]:
        """News of requests that go on: of every token, or of the first."""
        updates: list[Update] = []
        if not self.awaited:
            return updates
        stop = 0
        for order, count in zip(accepted.orders.tolist(), accepted.counts.tolist(), strict=True):
            start, stop = stop, stop + count
            account = self.awaited.get(order)
            if account is None:
                continue
            updates.append(account.tell(accepted.tokens[start:stop]))
            if not account.stream_tokens and account.told:
                del self.awaited[order]
        return updates

    def close(self, ended: Ended) -> Update:
        """The last of a request's news."""
        account = self.accounts.pop(ended.id)
        self.unseat(account)
        if account.cached is None:
            self.leave(account)
        self.prompt_tokens += len(account.request.prompt)
        self.cached_tokens += account.cached or 0
        self.failed += ended.reason == "error"
        return account.tell_last(
            ended.tokens,
            ended.reason,
            preemptions=ended.preemptions,
            stop_token=int(ended.tokens[-1]) if ended.reason == "stop" else None,
            error="the step of this request failed; the log has the reason"
            if ended.reason == "error"
            else None,
        )

    def unfinished(self, state: State) -> list[Update]:
        """The last news of every live request, when the engine goes: what is known of it so far."""
        known = {entry.request.id: entry.tokens for entry in state.waiting}
        for row, entry in enumerate(state.seats):
            if entry is not None:
                known[entry.request.id] = state.tokens[
                    row, : state.row_counters[RowCounter.NUM_KNOWN, row]
                ]
        return [
            account.tell_last(known.get(id, account.request.prompt), "abort")
            for id, account in self.accounts.items()
        ]

    def note_prompt_scores(self, plan: Plan, outcome: Outcome) -> None:
        """Keep the log-probabilities of prompt tokens that follow a scored position."""
        logit_ends = np.cumsum(plan.num_logits)
        for i in np.flatnonzero(plan.num_logits).tolist():
            account = self.by_order.get(int(plan.orders[i]))
            if account is None or not account.request.prompt_logprobs:
                continue
            prompt = account.request.prompt
            for at in range(int(logit_ends[i] - plan.num_logits[i]), int(logit_ends[i])):
                following = int(outcome.positions[at]) + 1
                if following < len(prompt):
                    most = account.request.params.prompt_logprobs
                    account.prompt_scores[following] = scored(
                        outcome, at, int(prompt[following]), most
                    )

    def note_scores(self, plan: Plan, outcome: Outcome, accepted: Accepted) -> None:
        """Keep the log-probabilities of sampled tokens that were asked for, if the scheduler took
        the token.
        """
        logits = dict(zip(plan.orders.tolist(), outcome.last_logits.tolist(), strict=True))
        for order in accepted.orders.tolist():
            account = self.by_order[order]
            most = account.request.params.logprobs
            if most is not None:
                at = logits[order]
                account.scores.append(scored(outcome, at, int(outcome.tokens[at]), most))


def scored(outcome: Outcome, at: int, token: int, most: int) -> TokenLogprob:
    """The score of one logit position, for `token`, with `most` alternatives: a batch computes the
    most that any row wants.
    """
    assert (
        outcome.logprobs is not None
        and outcome.top_ids is not None
        and outcome.top_logprobs is not None
    )
    top = zip(
        outcome.top_ids[at, :most].tolist(), outcome.top_logprobs[at, :most].tolist(), strict=True
    )
    return TokenLogprob(token, float(outcome.logprobs[at]), tuple(top))
