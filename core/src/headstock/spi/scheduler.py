"""Scheduler plugins: one pure function from what is visible to what should run next."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from headstock.spi.arrays import Ints
from headstock.spi.plugin import PluginSpec


def none() -> Ints:
    """No rows."""
    import numpy as np  # a fifth of the time in which `headstock plugins list` answers

    return np.zeros(0, np.int32)


@frozen(kw_only=True, eq=False)
class View:
    """What `choose` may look at; not to be written.

    rows_by_priority: [running] taken rows, highest priority, then earliest arrival, first
    by row, zero where the row is free: want, tokens it would like computed (0: waits for a token in
    flight); computed, tokens already computed; prompt, the prompt's length; last_run, the number of
    the step that the row last ran in
    waiting_lengths, waiting_priorities: one entry for each of the first `budget.free_rows` waiting
    requests, in queue order All are int32. `number` counts steps.
    """

    rows_by_priority: Ints
    want: Ints
    computed: Ints
    prompt: Ints
    last_run: Ints
    waiting_lengths: Ints
    waiting_priorities: Ints
    number: int


@frozen(kw_only=True)
class Budget:
    """The limits of one step: tokens, seats and pages (free or evictable), and the size of a
    page.
    """

    tokens: int
    free_rows: int
    pages: int
    page_size: int


@frozen(kw_only=True, eq=False)
class Choice:
    """What to run.

    rows, counts: [n] running rows, each once, in order of preference, and how many of the wanted
    tokens each may compute, at least one
    admit: positions in the waiting view, ascending, to seat now; they share what the counts leave
        of the token budget
    victims: running rows to preempt whatever the pressure (core picks its own when pages run out)
    """

    rows: Ints
    counts: Ints
    admit: Ints = field(factory=none)
    victims: Ints = field(factory=none)


Choose = Callable[[View, Budget], Choice]


@frozen(kw_only=True)
class SchedulerSpec(PluginSpec):
    """A scheduler as its entry point returns it; `implementation` names a pure
    `choose(view, budget) -> Choice`.
    """
