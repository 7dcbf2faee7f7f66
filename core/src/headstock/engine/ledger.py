"""Who is owed which tokens: from rows and admission numbers back to requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field

from headstock.engine.inline import Outcome
from headstock.engine.update import TokenLogprob, Update
from headstock.schedule import Column, Ended, Plan, Request, State

Ints = np.ndarray


@define(eq=False)
class Account:
    """One live request: the scores gathered so far for its prompt, and whether they have been told."""

    request: Request
    prompt_scores: dict[int, TokenLogprob] = field(factory=dict)
    told_prompt: bool = False
    cached: int | None = None
    told_first: bool = False
    last_token: int | None = None


@define
class Ledger:
    """The live requests, by id and by the admission number of the seat they have, and counts since the start."""

    accounts: dict[str, Account] = field(factory=dict)
    by_order: dict[int, Account] = field(factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0
    peak_held_pages: int = 0

    def open(self, request: Request) -> None:
        """Start an account."""
        self.accounts[request.id] = Account(request)

    def knows(self, id: str) -> bool:
        """Whether a live request has this id."""
        return id in self.accounts

    def unseated(self) -> list[int]:
        """Lengths of the prompts that never had a seat yet; may be asked from any thread."""
        return [len(account.request.prompt) for account in list(self.accounts.values()) if account.cached is None]

    def seat(self, plan: Plan, state: State) -> None:
        """Note the admission numbers that the plan gave out."""
        self.peak_held_pages = max(self.peak_held_pages, int(np.count_nonzero(state.refs[0])))
        for row in plan.joined.tolist():
            entry = state.seats[row]
            assert entry is not None, f"row {row} joined without a request"
            account = self.by_order[int(state.columns[Column.ORDER, row])] = self.accounts[entry.request.id]
            if account.cached is None:  # what a preempted request finds later is its own
                account.cached = int(state.columns[Column.CACHED, row])

    def settle(self, plan: Plan | None, outcome: Outcome | None, state: State) -> tuple[Update, ...]:
        """What is to be told of the step that ran `plan` and led to `state`."""
        updates: dict[str, dict[str, Any]] = {}
        if plan is not None and outcome is not None and outcome.logprobs is not None:
            self.note_prompt_scores(plan, outcome)
        scores = self.scores(plan, outcome)
        offset = 0
        accepted = state.accepted
        for order, count in zip(accepted.orders.tolist(), accepted.counts.tolist(), strict=True):
            account = self.by_order[order]
            tokens = tuple(accepted.tokens[offset : offset + count].tolist())
            offset += count
            account.last_token = tokens[-1] if tokens else account.last_token
            news = updates[account.request.id] = {"tokens": tokens}
            if not account.told_first:
                news["cached_tokens"], account.told_first = account.cached, True
            if order in scores and account.request.params.logprobs is not None:
                news["logprobs"] = (trimmed(scores[order], account.request.params.logprobs),)
            if account.request.prompt_logprobs and not account.told_prompt:
                news["prompt_logprobs"] = prompt_table(account)
            self.output_tokens += count
        for ended in state.ended:
            updates.setdefault(ended.id, {}).update(self.close(ended))
        return tuple(Update(id=id, **news) for id, news in updates.items())

    def close(self, ended: Ended) -> dict[str, Any]:
        """The last of a request's news."""
        account = self.accounts.pop(ended.id)
        self.by_order.pop(ended.order, None)
        self.prompt_tokens += len(account.request.prompt)
        self.cached_tokens += account.cached or 0
        self.failed += ended.reason == "error"
        news: dict[str, Any] = {
            "finish_reason": ended.reason,
            "preemptions": ended.preemptions,
        }
        if ended.reason == "stop":
            news["stop_token"] = account.last_token
        if ended.reason == "error":
            news["error"] = "the step of this request failed; the log has the reason"
        return news

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
                    score = scored(outcome, at, int(prompt[following]))
                    account.prompt_scores[following] = trimmed(score, account.request.params.prompt_logprobs)

    def scores(self, plan: Plan | None, outcome: Outcome | None) -> dict[int, TokenLogprob]:
        """The log-probability of each row's sampled token, by admission number."""
        if plan is None or outcome is None or outcome.logprobs is None:
            return {}
        last = outcome.last_logits
        return {
            int(plan.orders[i]): scored(outcome, int(last[i]), int(outcome.tokens[last[i]]))
            for i in np.flatnonzero(plan.samples).tolist()
        }


def scored(outcome: Outcome, at: int, token: int) -> TokenLogprob:
    """The score of one logit position, for `token`."""
    assert outcome.logprobs is not None and outcome.top_ids is not None and outcome.top_logprobs is not None
    top = zip(outcome.top_ids[at].tolist(), outcome.top_logprobs[at].tolist(), strict=True)
    return TokenLogprob(token, float(outcome.logprobs[at]), tuple(top))


def trimmed(score: TokenLogprob, count: int) -> TokenLogprob:
    """The score with as many alternatives as its request asked for: a batch computes the most that any row wants."""
    return score if len(score.top) <= count else TokenLogprob(score.token, score.logprob, score.top[:count])


def prompt_table(account: Account) -> tuple[TokenLogprob | None, ...]:
    """The scores of the whole prompt, told once."""
    account.told_prompt = True
    return tuple(account.prompt_scores.get(position) for position in range(len(account.request.prompt)))
