"""How many prompt tokens a step may have beside decode rows, by the steps that were timed.

The model of a step's time is linear: a + b * tokens of prompts + c * tokens that decode rows read +
d * pairs of prompt tokens, fitted by least squares in which old steps fade. A step with prompts
takes no less than a floor: what its launches take, however few its tokens are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from operator import mul, truediv
from statistics import median

import numpy as np
from attrs import evolve, frozen

from headstock.config import EngineConfig
from headstock.scheduler import Paced, Plan, RowCounter, State
from headstock.scheduler.row_counters import find_decode_rows

LEAST_TOKENS = 64
"""Prompt tokens that a step may always have: with fewer, prompts would starve."""

WORTHWHILE_CUT = 1.25
"""Where no step keeps the bound, how many times the time of the shortest one a step may take.

On a slow host that launches attention layer by layer, a step took 10 ms whatever it had. Chunks of
64 tokens spared streams nothing then, and prompts waited for four seconds.
"""

STREAM_BOUND = 300.0
"""Milliseconds of a step beside streams on a CPU, where nothing says how many.

16 prompts of 1,400 words stopped a stream for 13.8 seconds there. A GPU computes a whole step of
prompts in less than this.
"""
BOUND_STEPS = 10
"""By default, this many steps without prompts may take as long as one with them.

Each chunk brings a decode step along, which then is at most a tenth of it.
"""
READER_SECONDS = 10.0
"""So long after the end of a stream its reader may ask again, and expects a token as soon."""
_NUM_PLAIN_STEPS = 8

_KEPT = 0.98
"""The weight that a step has left after one more."""
_DECODE_STRIDE = 8
"""One in this many steps without prompt tokens is timed.

They are nine of ten steps, and the bound is on the others. Timed each, they cost the host more than
they tell, and the fit forgot all but the last few steps with prompts.
"""
_FEW_TOKENS = 2 * LEAST_TOKENS
"""Prompt tokens of a short step, which may show the floor."""
_LEAST_LARGEST = 4 * _FEW_TOKENS
"""Once a step had this many prompt tokens, the fit ignores short steps.

A hundred chunks of 112 tokens took 6.5 ms each, for their launches. The fit laid that to tokens and
pairs, and no larger chunk was tried.
"""
_NUM_SHORT_STEPS = 16
_FLOOR_AGE = 256
"""Timed steps after which a floor that none of them has shown is forgotten."""
_EVEN = 1.3
"""Short steps show a floor if their upper quartile is at most this multiple of the lower one."""
_ABOVE_FLOOR = 1.2
"""They do if they take more than this multiple of their terms' time.

A longer step that takes at most this many floors does not reveal its terms.
"""
_RIDGE = 1e-3
_NUM_ERRORS = 64
_LEAST_SEEN = 8
"""Short steps that are timed before it is believed that none of them keeps a bound."""
_MARGIN_QUANTILE = 0.95
_OUTLIER = 4.0
"""A step that took this multiple of its prediction is ignored: a kernel was compiled, or the
process was stopped.
"""
_SCALES = (1.0, 256.0, 65_536.0, 1_048_576.0)
"""What the terms are divided by, so that the ridge holds them alike."""

Numbers = tuple[float, ...]
"""Plain numbers. numpy's linear algebra lets the interpreter go, and an event loop with tokens to
hand out keeps it for longer than all of this takes.
"""


@frozen(kw_only=True)
class StepWork:
    """What a step's time depends on.

    prompt_tokens: of all chunks
    decode_context: tokens that decode rows read
    prompt_pairs: query and key pairs of all chunks
    graph_tokens: tokens of the graph that a step with prompts is padded to, decode rows included;
        0 without graphs, where decode rows take hardly longer
    """

    prompt_tokens: int = 0
    decode_context: int = 0
    prompt_pairs: float = 0.0
    graph_tokens: int = 0

    @classmethod
    def of(cls, plan: Plan, graph_sizes: Sequence[int] = ()) -> StepWork:
        """The work of a plan."""
        starts, counts = plan.starts[plan.num_decode :], (plan.stops - plan.starts)
        counts = counts[plan.num_decode :].astype(np.int64)
        return cls(
            prompt_tokens=int(counts.sum()),
            decode_context=int(plan.stops[: plan.num_decode].sum(dtype=np.int64)),
            prompt_pairs=float((counts * (starts + counts / 2)).sum()),
            graph_tokens=_pad(plan.num_tokens, graph_sizes) if graph_sizes and len(counts) else 0,
        )

    def terms(self) -> Numbers:
        """The model's terms, [4]."""
        tokens = self.graph_tokens or self.prompt_tokens
        terms = (1.0, tokens, self.decode_context, self.prompt_pairs)
        return tuple(map(truediv, terms, _SCALES))


@frozen
class ShortStep:
    """A step with few prompt tokens.

    by_terms: milliseconds that its terms were predicted to take
    decode_context: tokens that decode rows read
    """

    milliseconds: float
    by_terms: float
    decode_context: int


@frozen(kw_only=True, eq=False)
class StepTimes:
    """The fit after some steps.

    gram: [4, 4], moment: [4], of terms and milliseconds
    errors: milliseconds by which the last steps took longer than predicted
    largest: the most prompt tokens that a timed step had
    num_least: timed steps with no more prompt tokens than are always allowed, and some
    short_steps: the last steps with few prompt tokens
    shown: the count when a step last showed the floor, or could have
    """

    gram: tuple[Numbers, ...] = ((0.0,) * 4,) * 4
    moment: Numbers = (0.0,) * 4
    errors: tuple[float, ...] = ()
    largest: int = 0
    num_least: int = 0
    short_steps: tuple[ShortStep, ...] = ()
    shown: int = 0
    count: int = 0

    def observe(self, work: StepWork, milliseconds: float) -> StepTimes:
        """The fit with one more step."""
        terms, by_terms, floor = work.terms(), self.predict(work), self.find_floor(work)
        predicted = max(by_terms, floor)
        is_known = self.count >= 8 and work.prompt_tokens <= self.largest
        errors = self.errors
        if is_known:
            errors = (*errors, milliseconds - predicted)[-_NUM_ERRORS:]
            if milliseconds > _OUTLIER * max(predicted, 0.1):
                return evolve(self, errors=errors)
        short_steps = self.short_steps
        is_short = 0 < work.prompt_tokens <= _FEW_TOKENS
        if is_short:
            short = ShortStep(milliseconds, by_terms, work.decode_context)
            short_steps = (*short_steps, short)[-_NUM_SHORT_STEPS:]
        is_floor = by_terms <= milliseconds <= _ABOVE_FLOOR * floor
        noted = evolve(
            self,
            errors=errors,
            largest=max(self.largest, work.prompt_tokens),
            num_least=self.num_least + (0 < work.prompt_tokens <= LEAST_TOKENS),
            short_steps=short_steps,
            shown=self.count if is_floor or is_short else self.shown,
            count=self.count + 1,
        )
        # What takes less than its terms always counts: a fit that is too slow keeps chunks short.
        is_left_out = is_short and self.largest >= _LEAST_LARGEST and by_terms <= milliseconds
        if is_floor or is_left_out:
            return noted
        return evolve(
            noted,
            gram=tuple(
                tuple(_KEPT * old + one * other for old, other in zip(line, terms, strict=True))
                for line, one in zip(self.gram, terms, strict=True)
            ),
            moment=tuple(
                _KEPT * old + term * milliseconds
                for old, term in zip(self.moment, terms, strict=True)
            ),
        )

    def predict(self, work: StepWork) -> float:
        """Milliseconds of a step by its terms, which are never negative."""
        return float(sum(map(mul, self.fit, work.terms())))

    def find_floor(self, work: StepWork) -> float:
        """Milliseconds that a step takes however few its prompt tokens are.

        0 where it has none: the last short steps took unevenly long, or what their terms take.
        """
        seen, is_fresh = self.short_steps, self.count - self.shown <= _FLOOR_AGE
        is_shown = len(seen) >= _NUM_SHORT_STEPS // 2 and self.largest >= _LEAST_LARGEST
        if not (work.prompt_tokens and is_shown and is_fresh):
            return 0.0
        by_context = self.fit[2] / _SCALES[2]
        taken = sorted(short.milliseconds - by_context * short.decode_context for short in seen)
        low, high = taken[len(seen) // 4], taken[3 * len(seen) // 4]
        longer = sorted(short.milliseconds / max(short.by_terms, 0.01) for short in seen)
        is_floor = high <= _EVEN * low and longer[len(seen) // 4] > _ABOVE_FLOOR
        return low + by_context * work.decode_context if is_floor else 0.0

    def margin(self) -> float:
        """Milliseconds by which one step of twenty takes longer than predicted."""
        if not self.errors:
            return 0.0
        # numpy takes as long for this as for the rest of a choice.
        place = _MARGIN_QUANTILE * (len(self.errors) - 1)
        below, ordered = int(place), sorted(self.errors)
        above = ordered[min(below + 1, len(ordered) - 1)]
        return max(ordered[below] + (place - below) * (above - ordered[below]), 0.0)

    @cached_property
    def fit(self) -> Numbers:
        """The fit's coefficients, [4], none negative."""
        kept = [0, 1, 2, 3]
        while True:
            lines = [[self.gram[i][j] + _RIDGE * (i == j) for j in kept] for i in kept]
            solution = _solve_positive(lines, [self.moment[i] for i in kept])
            if all(number >= 0 for number in solution):
                found = dict(zip(kept, solution, strict=True))
                return tuple(found.get(i, 0.0) for i in range(4))
            kept = [i for i, number in zip(kept, solution, strict=True) if number >= 0]


def _solve_positive(lines: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a few linear equations; their matrix is symmetric and positive definite.

    writes: lines, right
    """
    count = len(lines)
    for i in range(count):  # this matrix needs no pivoting
        for j in range(i + 1, count):
            factor = lines[j][i] / lines[i][i]
            for k in range(i, count):
                lines[j][k] -= factor * lines[i][k]
            right[j] -= factor * right[i]
    for i in reversed(range(count)):
        known = sum(lines[i][k] * right[k] for k in range(i + 1, count))
        right[i] = (right[i] - known) / lines[i][i]
    return right


def _pad(num_tokens: int, graph_sizes: Sequence[int]) -> int:
    """The size of the smallest graph with room for the tokens; their number if there is none."""
    return min((size for size in graph_sizes if size >= num_tokens), default=num_tokens)


def list_prompt_tokens(graph_sizes: Sequence[int], decode_rows: int, most: int) -> list[int]:
    """Prompt tokens that fill a step beside the rows, ascending, from `LEAST_TOKENS` on.

    Steps have the size of a graph. Without graphs, each is twice as large as the one before.
    Without graphs the rows do not count.
    """
    rows = decode_rows if graph_sizes else 0
    steps = [LEAST_TOKENS + rows]
    for size in sorted({*graph_sizes, most + rows + 1}):
        # A larger gap could never be tried: see `choose_prompt_tokens`.
        while 2 * steps[-1] < size:
            steps.append(2 * steps[-1])
        if size > steps[-1]:
            steps.append(size)
    return [step - rows for step in steps if step <= most + rows]


def choose_prompt_tokens(
    times: StepTimes,
    *,
    decode_context: int,
    context: int,
    bound: float,
    most: int,
    decode_rows: int = 0,
    graph_sizes: Sequence[int] = (),
) -> int:
    """The most prompt tokens with which a step is predicted to take no more than `bound`.

    Where no step does, the most with which it takes hardly longer than with the fewest.

    decode_context: tokens that the next step's decode rows read
    context: tokens computed of the prompt that goes on
    bound: milliseconds
    decode_rows: rows beside which the prompt tokens are computed
    graph_sizes: tokens of the steps that have graphs, to which smaller steps are padded
    returns: one of `list_prompt_tokens`, or `LEAST_TOKENS` if none fits
    """
    # No more than twice the step that was ever timed: the fit knows nothing of what lies beyond.
    rows = decode_rows if graph_sizes else 0
    most = min(most, max(2 * times.largest + rows, LEAST_TOKENS))
    candidates = list_prompt_tokens(graph_sizes, decode_rows, most)
    fixed, by_token, by_context, by_pair = (
        number / scale for number, scale in zip(times.fit, _SCALES, strict=True)
    )
    tokens = np.array(candidates, float)
    predicted = fixed + by_context * decode_context + by_token * (tokens + rows)
    predicted += by_pair * tokens * (context + tokens / 2)
    shortest = StepWork(prompt_tokens=LEAST_TOKENS, decode_context=decode_context)
    floor = times.find_floor(shortest)
    predicted = np.maximum(predicted, floor)
    limit = bound - times.margin()
    is_shown = floor > 0 or times.num_least >= _LEAST_SEEN
    if candidates and predicted[0] > limit and is_shown:
        # Uneven steps do not starve prompts either: no margin is left then.
        worthwhile = WORTHWHILE_CUT * predicted[0]
        limit = min(bound, worthwhile) if predicted[0] <= bound else worthwhile
    # More tokens never take less by the fit, so that those which fit come first.
    num_fitting = int((predicted <= limit).sum())
    return candidates[num_fitting - 1] if num_fitting else LEAST_TOKENS


class StepPacer:
    """Fits the times of steps, and bounds the prompt tokens of those with decode rows.

    bound: limit of such a step in milliseconds; None: no step is timed
    most: the most tokens of a step
    graph_sizes: tokens of the steps that have graphs
    is_default: whether the bound is for streams alone, and gives way where prompts would be much
        slower for it
    num_ended: streams that have ended, as far as is known
    last_end: when the last of them did
    plain_steps: milliseconds of the last timed steps without prompt tokens
    """

    def __init__(
        self,
        bound: float | None,
        most: int,
        graph_sizes: Sequence[int] = (),
        *,
        is_default: bool = False,
    ) -> None:
        self.bound, self.most, self.graph_sizes = bound, most, graph_sizes
        self.is_default = is_default
        self.num_ended, self.last_end = 0, -READER_SECONDS
        self.times = StepTimes()
        self.num_untimed = 0
        self.plain_steps: deque[float] = deque(maxlen=_NUM_PLAIN_STEPS)

    def note_end(self, plan: Plan, seconds: float) -> None:
        """Record a finished step and its seconds."""
        if self.bound is None:
            return
        if plan.num_decode == len(plan.rows) and self.num_untimed < _DECODE_STRIDE - 1:
            self.num_untimed += 1
            return
        self.num_untimed = 0
        work = StepWork.of(plan, self.graph_sizes)
        if not work.prompt_tokens:
            self.plain_steps.append(1000 * seconds)
        self.times = self.times.observe(work, 1000 * seconds)

    def make_events(
        self,
        state: State,
        *,
        has_arrivals: bool,
        num_streams: int,
        num_ended: int,
        now: float,
    ) -> list[Paced]:
        """The scheduler's event where the bound on prompt tokens changes.

        has_arrivals: whether requests arrive that the state does not know
        num_streams, num_ended: requests whose tokens are read one by one, those that are here and
            those that have ended since the start
        now: in seconds
        """
        if self.bound is None:
            return []
        if num_ended > self.num_ended:
            self.num_ended, self.last_end = num_ended, now
        may_return = now - self.last_end < READER_SECONDS
        decoding = find_decode_rows(state.row_counters)
        has_waiting = has_arrivals or len(state.waiting) > 0
        if not has_waiting and decoding.all():
            return []  # the next step has no prompt tokens
        if self.is_default and not (may_return or num_streams):
            is_bounded = state.pace is not None and state.pace.prompt_tokens < self.most
            return [Paced(self.most)] if is_bounded else []
        computed = state.row_counters[RowCounter.NUM_COMPUTED]
        tokens = choose_prompt_tokens(
            self.times,
            decode_context=int(computed[decoding].sum(dtype=np.int64)),
            context=int(computed[~decoding].max(initial=0)),
            bound=self._find_bound(self.bound),
            most=self.most,
            # Free rows pass for decode rows, but know no token.
            decode_rows=int((decoding & (state.row_counters[RowCounter.NUM_KNOWN] > 0)).sum()),
            graph_sizes=self.graph_sizes,
        )
        # A prompt without requests waiting behind it has its steps for itself.
        pace = Paced(tokens, every_step=self.is_default and (has_waiting or may_return))
        return [] if pace == state.pace else [pace]

    def _find_bound(self, bound: float) -> float:
        """The milliseconds that the next step may take."""
        if not self.is_default:
            return bound
        if self.plain_steps:
            bound = max(bound, BOUND_STEPS * median(self.plain_steps))
        # Uneven steps, as beside other programs, cut chunks to half of the bound at most.
        return max(bound, bound / 2 + self.times.margin())


def make_pacer(config: EngineConfig, device: str, graph_sizes: Sequence[int]) -> StepPacer:
    """Make the pacer of an engine."""
    bound, most = config.max_itl_ms, config.max_batch_tokens
    if not isinstance(bound, str):
        return StepPacer(bound, most, graph_sizes)
    bound = STREAM_BOUND if device == "cpu" else None
    return StepPacer(bound, most, graph_sizes, is_default=True)
