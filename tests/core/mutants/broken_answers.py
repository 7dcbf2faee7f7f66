"""Engines that each answer something else than was asked: of sampling, of text and its end, of
counts, of scale.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from headstock.engine import output_tracker
from headstock.execution import logit_rules
from headstock.nn import decoder_config, penalties, sampler
from headstock.requests import client, input_processor, prompt_request
from headstock.text import completion, detokenizer
from headstock.text.stop import StopStringMatcher

from .broken import DIFFERS, Mutant, around

TEXT_DIFFERS = r"assert '.* == "
"""Two texts that were to be equal are not."""


def min_p_last(gumbel_scores: Any, logits: Tensor, temperature: Tensor, asked: Any) -> Tensor:
    """min-p is applied to what top-k and top-p have left."""
    if asked.min_p is None:
        return gumbel_scores(logits, temperature, asked)
    warm = temperature.clamp(min=sampler.COLDEST)[:, None]
    cut = (
        sampler.apply_min_p((logits - logits.amax(-1, keepdim=True)) / warm, asked.min_p)
        == -math.inf
    )
    return gumbel_scores(logits, temperature, evolve(asked, min_p=None)).masked_fill_(
        cut, -math.inf
    )


def cut_when_cold(gumbel_scores: Any, logits: Tensor, temperature: Tensor, asked: Any) -> Tensor:
    """The temperature is applied to what has been cut."""
    scores = logits - logits.amax(-1, keepdim=True)
    if asked.min_p is not None:
        scores = sampler.apply_min_p(scores, asked.min_p)
    if asked.top_k is not None or asked.top_p is not None:
        scores = sampler.apply_top_k_top_p(scores, asked.top_k, asked.top_p)
    return gumbel_scores(scores, temperature, evolve(asked, min_p=None, top_k=None, top_p=None))


def one_beyond_top_p(
    apply_top_k_top_p: Any, scores: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    """A sum that is top_p exactly is not enough."""
    return apply_top_k_top_p(
        scores, top_k, None if top_p is None else top_p.nextafter(torch.full_like(top_p, 2.0))
    )


def highest_id_first(
    apply_top_k_top_p: Any, scores: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    """Of equal scores the higher token id is the better."""
    return apply_top_k_top_p(scores.flip(-1), top_k, top_p).flip(-1)


def none_but_more_likely(apply_min_p: Any, scores: Tensor, min_p: Tensor) -> Tensor:
    """A token that is just likely enough is cut."""
    edge = scores.amax(-1, keepdim=True) + min_p.log()[:, None]
    return apply_min_p(scores, min_p).masked_fill(scores == edge, -math.inf)


def prompt_counted(token_counts: Any, logits: Tensor, asked: Any) -> Any:
    """Presence and frequency count the prompt too."""
    return token_counts(logits, evolve(asked, prompt_lens=torch.zeros_like(asked.prompt_lens)))


def scores_with_bias(
    attach_logprobs: Any, tokens: Tensor, healthy: Tensor, scores: Tensor, asked: Any
) -> Any:
    """Log-probabilities are those after biases."""
    biased = scores if asked.bias is None else (scores + asked.bias).log_softmax(-1)
    return attach_logprobs(tokens, healthy, biased, asked)


def seed_of_the_first(init: Any, self: Any, *arguments: Any, **keywords: Any) -> None:
    """All answers to a prompt have one seed."""
    init(self, *arguments, **keywords)
    first = self.requests[0].params.seed
    self.requests = tuple(
        evolve(each, params=evolve(each.params, seed=first)) for each in self.requests
    )


def short_context(patch: pytest.MonkeyPatch) -> None:
    """Fewer tokens stay in the window than a character may have."""
    patch.setattr(detokenizer, "CONTEXT", 2)


def unfinished_lost(flush: Any, self: Any) -> str:
    """What was held back of the last character does not come."""
    flush(self)
    return ""


def runs_on(apply_update: Any, self: Any, update: Any, seconds: float) -> Any:
    """A stop string ends the answer, and not the request."""
    loop, self.loop = (
        self.loop,
        SimpleNamespace(abort=lambda name: None, check_alive=self.loop.check_alive),
    )
    try:
        return apply_update(self, update, seconds)
    finally:
        self.loop = loop


def held_text_lost(flush: Any, self: Any) -> str:
    """The beginning of a stop string that the text ends with does not come."""
    flush(self)
    return ""


def scores_of_all(add_logprobs: Any, self: Any, update: Any, num_tokens: int, tables: Any) -> Any:
    """Tokens behind a stop string count towards the log-probability."""
    return add_logprobs(self, update, len(update.tokens), tables)


def told_by_any(update_metrics: Any, self: Any, update: Any, seconds: float) -> None:
    """cached_tokens are those of the answer that was told last."""
    update_metrics(self, update, seconds)
    if update.cached_tokens is not None:
        self.metrics = evolve(self.metrics, cached_tokens=update.cached_tokens)


def only_the_last_preempted(update_metrics: Any, self: Any, update: Any, seconds: float) -> None:
    """preemptions are those of the answer that ended last."""
    update_metrics(self, update, seconds)
    if update.finish_reason is not None:
        self.metrics = evolve(self.metrics, preemptions=update.preemptions)


def cached_anew(seat: Any, self: Any, plan: Any, state: Any, limits: Any) -> None:
    """What a preempted request finds of its own counts as cached."""
    seat(self, plan, state, limits)
    for row in plan.new_row_ids.tolist():
        entry = state.requests_by_row[row]
        self.requests[entry.request.id].cached_tokens = int(
            state.row_counters[output_tracker.RowCounter.NUM_CACHED, row]
        )


def largest_first(check_priority: Any, priority: Any) -> Any:
    """The higher priority goes first."""
    return -check_priority(priority)


def bias_at_first(of: Any, request: Any, vocab: int) -> Any:
    """Biases end with min_tokens."""
    made = of(request, vocab)
    return evolve(
        made,
        end_len=max(made.min_len, len(request.prompt) + 1)
        if made.end_len == logit_rules.NO_END
        else made.end_len,
    )


def wrong_at_128(
    make_layers: Any,
    windows: Any,
    experts: Any,
    convs: Any,
    groups: Any,
    scales: Any,
    *others: Any,
) -> Any:
    """Attention of the commonest head size is scaled by too much."""
    wrong = [scale * math.sqrt(2) if scale == 128**-0.5 else scale for scale in scales]
    return make_layers(windows, experts, convs, groups, wrong, *others)


def armed_early(patch: pytest.MonkeyPatch) -> None:
    """A stop string may end with the last of min_tokens."""
    patch.setattr(
        completion.CompletionBuilder,
        "can_stop",
        property(lambda self: self.num_tokens >= self.params.min_tokens),
    )


MISTAKEN = {
    "min-p applied last": Mutant(
        around(sampler, "gumbel_scores", min_p_last), "min-p comes before top-p"
    ),
    "temperature applied last": Mutant(
        around(sampler, "gumbel_scores", cut_when_cold), "temperature first"
    ),
    "one token beyond top-p": Mutant(
        around(sampler, "apply_top_k_top_p", one_beyond_top_p), "a tie"
    ),
    "of equal tokens the later stays": Mutant(
        around(sampler, "apply_top_k_top_p", highest_id_first), "a tie"
    ),
    "min-p of 1 keeps nothing": Mutant(
        around(sampler, "apply_min_p", none_but_more_likely), "min-p of 1"
    ),
    "penalties count the prompt": Mutant(
        around(penalties, "token_counts", prompt_counted), "Not equal to tolerance"
    ),
    "biases count in scores": Mutant(
        around(sampler, "attach_logprobs", scores_with_bias), "Tensor-likes are not close"
    ),
    "one seed for all answers": Mutant(
        around(prompt_request.PromptRequest, "__init__", seed_of_the_first), DIFFERS
    ),
    "a context of two tokens": Mutant(short_context, TEXT_DIFFERS),
    "unfinished character lost": Mutant(
        around(detokenizer.Detokenizer, "flush", unfinished_lost), TEXT_DIFFERS
    ),
    "a stop string ends no request": Mutant(
        around(client.RequestClient, "apply_update", runs_on), "it runs on"
    ),
    "stop strings armed early": Mutant(armed_early, "min_tokens"),
    "beginning of a stop string lost": Mutant(
        around(StopStringMatcher, "flush", held_text_lost), DIFFERS
    ),
    "scores behind a stop string count": Mutant(
        around(completion.CompletionBuilder, "add_logprobs", scores_of_all), DIFFERS
    ),
    "cached tokens of any answer": Mutant(
        around(prompt_request.PromptRequest, "update_metrics", told_by_any),
        "cached_tokens|told in the order",
    ),
    "preemptions of one answer": Mutant(
        around(prompt_request.PromptRequest, "update_metrics", only_the_last_preempted),
        "preemptions",
    ),
    "cached tokens counted anew": Mutant(
        around(output_tracker.OutputTracker, "track_admissions", cached_anew), "cached tokens"
    ),
    "largest priority first": Mutant(
        around(input_processor, "check_priority", largest_first), "order"
    ),
    "biases end with min_tokens": Mutant(
        around(logit_rules.LogitRules, "from_request", bias_at_first), DIFFERS
    ),
    "attention scaled wrong at 128": Mutant(
        around(decoder_config, "make_layers", wrong_at_128), DIFFERS
    ),
}
"""What answers are wrong about -> how, and in which words it is noticed."""
