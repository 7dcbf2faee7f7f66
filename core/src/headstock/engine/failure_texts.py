"""What went wrong, in one line: for requests whose step failed, and where scheduling raised."""

from __future__ import annotations

import logging

import numpy as np
from attrs import evolve

from headstock.engine.in_flight import InFlightStep
from headstock.errors import (
    MAX_ERROR_LENGTH,
    EngineDied,
    HeadstockError,
    PluginBroken,
    compose_error,
    describe_error,
    describe_location,
)
from headstock.logs import log_event
from headstock.scheduler import Plan
from headstock.scheduler.invariants import IndexContradiction
from headstock.startup.blame import PluginNames

LOG = logging.getLogger(__name__)

LINE = MAX_ERROR_LENGTH - 40
"""Characters of an error that others put words before: "the engine stopped: ", "prompt 12: "."""


def log_failed_step(plan: Plan, error: BaseException, names: PluginNames, recording: str) -> str:
    """Log a step that failed; return why it did, for its requests.

    recording: where the schedule so far is
    raises: the error itself if it is EngineDied
    """
    plugin = names.name_of(error)
    facts = {
        "step": plan.number,
        "rows": len(plan.rows),
        "at": describe_location(error),
        **({"plugin": plugin} if plugin else {}),
        "recording": recording,
    }
    LOG.error(log_event("step failed", **facts), exc_info=error)
    if isinstance(error, EngineDied):
        raise error
    return compose_error(
        f"the step of this request failed: {names.describe(error)}",
        "the log has the reason",
        most=LINE,
    )


def explain_scheduling_error(
    error: BaseException, names: PluginNames, cache: str, tail: str
) -> HeadstockError:
    """Make the error that ends an engine when the scheduler, or a plugin that it calls, raised.

    cache: the name of the cache policy
    tail: where the recording is
    """
    if isinstance(error, PluginBroken):
        return PluginBroken(compose_error(str(error), tail, most=LINE))
    if names.name_of(error):
        return PluginBroken(compose_error(names.describe(error), tail, most=LINE))
    if isinstance(error, IndexContradiction):
        return _explain_index(str(error), cache, tail)
    if isinstance(error, AssertionError):
        text = f"internal error: the scheduler contradicts itself: {error}"
    else:
        place = describe_location(error)
        text = f"internal error: scheduling failed in {place}: {describe_error(error)}"
    return EngineDied(f"{text}; {tail}")


def explain_contradiction(error: AssertionError, cache: str, tail: str) -> HeadstockError:
    """Make the error of an idle engine that still holds something.   cache, tail: as above"""
    if isinstance(error, IndexContradiction):
        return _explain_index(f"idle, yet {error}", cache, tail)
    return EngineDied(f"internal error: idle, yet {error}; {tail}")


def _explain_index(fault: str, cache: str, tail: str) -> PluginBroken:
    """Make the error of an index that contradicts the pages of rows."""
    text = f"the cache plugin {cache!r} and the pages of rows contradict each other: {fault}"
    return PluginBroken(compose_error(text, tail, most=LINE))


def drop_unknown_tokens(step: InFlightStep, vocab: int, ops: str) -> InFlightStep:
    """Return the step with rows that got a token outside the vocabulary as unhealthy ones.

    ops: the name of the operations that sampled
    """
    plan, sample = step.plan, step.sample
    if sample is None:
        return step
    tokens = sample.tokens.numpy()
    # As unsigned numbers, negative ones are the largest: one comparison finds both ends.
    is_unknown = tokens.astype(np.uint64) >= vocab
    if not np.count_nonzero(is_unknown):
        return step
    rows = plan.rows.repeat(plan.num_logits)[is_unknown].tolist()
    reasons = {
        row: (
            f"the ops plugin {ops!r} sampled the token {token}, which is not in the vocabulary of "
            f"{vocab}; report it to its author or choose others (--ops)"
        )
        for row, token in zip(rows, tokens[is_unknown].tolist(), strict=True)
    }
    healthy = sample.healthy.clone()
    healthy.numpy()[is_unknown] = False
    return evolve(step, sample=evolve(sample, healthy=healthy), reasons={**step.reasons, **reasons})
