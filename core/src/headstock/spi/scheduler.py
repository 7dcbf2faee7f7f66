"""Scheduler plugins: one pure function from a view of the rows to a decision for the next step."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from headstock.spi.arrays import Ints
from headstock.spi.plugin import PluginSpec


def no_rows() -> Ints:
    """Make an empty array of rows."""
    import numpy as np  # late: a fifth of the time in which `headstock plugins list` answers

    return np.zeros(0, np.int32)


@frozen(kw_only=True, eq=False)
class RequestColumns:
    """What requests ask for and how long they have been here: int32 arrays, one entry a request.

    lengths: prompt and output known so far; of a waiting request, the tokens that it has to compute
    num_prompt_tokens, max_tokens: the prompt's length, and the most tokens of the output
    priorities: higher goes first
    users, adapters: a number for each name, 0 for none. A name keeps its number while any request
        has it; numbers begin at 1, and stay as small as the names in use allow.
    waits: milliseconds since the request arrived, by the clock of the step
    """

    lengths: Ints
    num_prompt_tokens: Ints
    max_tokens: Ints
    priorities: Ints
    users: Ints
    adapters: Ints
    waits: Ints


@frozen(kw_only=True, eq=False, slots=False)  # filled faster than with slots
class View:
    """The read-only arrays that `schedule` decides by, all int32. Free rows have zeros.

    They are valid until `schedule` returns.

    rows_by_priority: [running] rows in use, highest priority first, then earliest arrival
    num_new_tokens: [rows] tokens that the row can compute; 0 while it waits for a sampled token
    num_computed_tokens: [rows] tokens computed so far
    num_prompt_tokens: [rows] the prompt's length
    last_step: [rows] the step that the row last ran in, or was admitted in
    num_drafts: [rows] how many of the new tokens are drafts; the row verifies them together with
        the token before them, and drafts that do not fit into the step are dropped
    waiting_lengths, waiting_priorities: [waiting] the first requests of the queue, in its order,
        no more than `budget.free_rows`
    list_running: makes the columns of the rows' requests, [rows]
    list_waiting: makes those of all requests in the queue, in its order

    `step` is the number of the step to schedule. The two functions are for `schedule` to call: a
    step costs more only where it does.
    """

    rows_by_priority: Ints
    num_new_tokens: Ints
    num_computed_tokens: Ints
    num_prompt_tokens: Ints
    last_step: Ints
    num_drafts: Ints
    # As many requests as could be admitted, not the queue: a step must not cost more the longer it
    # is.
    waiting_lengths: Ints
    waiting_priorities: Ints
    list_running: Callable[[], RequestColumns]
    list_waiting: Callable[[], RequestColumns]
    step: int


@frozen(kw_only=True)
class Budget:
    """The limits of one step: tokens and free rows.

    pages: by KV group, those that are free or evictable
    page_size: in tokens; a page of a state group holds one sequence, however long
    is_bounded: whether the step has fewer tokens than it could, so that it takes no longer than
        `--max-itl-ms`
    """

    tokens: int
    free_rows: int
    pages: tuple[int, ...]
    page_size: int
    is_bounded: bool = False


@frozen(kw_only=True, eq=False)
class ScheduleDecision:
    """The rows to run, requests to admit and rows to preempt in one step.

    rows, counts: [n] running rows, each once, and how many of its new tokens each computes, at
        least one
    admit: positions in the queue, ascending, which are those in the view's waiting arrays;
        admitted requests share the part of the token budget that the counts leave, in this order,
        until one has no room
    victims: running rows to preempt now; core picks others by priority when pages run out
    ask_again_ms: where nothing runs and nothing is admitted, on purpose: milliseconds from the
        step's clock until the next step, if no event comes before; None for at once. 10,000 count
        for more than that.
    """

    rows: Ints
    counts: Ints
    admit: Ints = field(factory=no_rows)
    victims: Ints = field(factory=no_rows)
    ask_again_ms: int | None = None


ScheduleFunction = Callable[[View, Budget], ScheduleDecision]


@frozen(kw_only=True)
class SchedulerSpec(PluginSpec):
    """A scheduler as its entry point returns it.

    `implementation` names a pure function `schedule(view, budget) -> ScheduleDecision`; with a
    class of options, a function that makes one out of them.
    """
