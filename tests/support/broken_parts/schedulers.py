"""Schedulers that are each wrong in one way."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from attrs import evolve

from headstock.builtin.mixed import schedule
from headstock.spi import Budget, ScheduleDecision, View

NOT_A_FUNCTION = 3


def raises(view: View, budget: Budget) -> ScheduleDecision:
    raise ZeroDivisionError("no rows")


def exits(view: View, budget: Budget) -> ScheduleDecision:
    sys.exit(7)


def returns_none(view: View, budget: Budget) -> Any:
    return None


def lists(view: View, budget: Budget) -> ScheduleDecision:
    chosen = schedule(view, budget)
    return evolve(chosen, rows=chosen.rows.tolist(), counts=chosen.counts.tolist())


def fractions(view: View, budget: Budget) -> ScheduleDecision:
    chosen = schedule(view, budget)
    return evolve(chosen, counts=chosen.counts * 0.5)


def twice(view: View, budget: Budget) -> ScheduleDecision:
    chosen = schedule(view, budget)
    both = [np.concatenate([part, part]) for part in (chosen.rows, chosen.counts)]
    return evolve(chosen, rows=both[0], counts=both[1])


def too_many(view: View, budget: Budget) -> ScheduleDecision:
    chosen = schedule(view, budget)
    return evolve(chosen, counts=chosen.counts + 1)


def unknown_position(view: View, budget: Budget) -> ScheduleDecision:
    return evolve(schedule(view, budget), admit=np.array([9], np.int32))


def writes_view(view: View, budget: Budget) -> ScheduleDecision:
    view.num_new_tokens[:] = 1
    return schedule(view, budget)


def preempts_free(view: View, budget: Budget) -> ScheduleDecision:
    return evolve(schedule(view, budget), victims=np.array([3], np.int32))
