"""What a scheduling step costs in steady decode: 256 rows, prefix index on, one request ending and
one arriving every 8 steps; and what an arrival costs while many wait.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import arrivals, columns
from benchmarks.running import ROWS, make_limits, make_request, sample_tokens

import headstock
from headstock.scheduler import Arrived, Event, RowCounter, initial_state, step
from headstock.startup.device import read_cpu_name
from headstock_bench.conditions import read_commit

WARM_UP = 100
"""Steps that are not timed."""


def measure_steps(
    page_size: int,
    steps: int,
    rows: int = ROWS,
    overlap: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each step, ascending. With `overlap` tokens come a step late, as in the engine."""
    rng = np.random.default_rng(0)
    limits = make_limits(page_size, rows, overlap)
    state = initial_state(limits)
    number = rows
    # Lengths are spread, so that about as many pages fill in every step.
    events: list[Event] = [Arrived(make_request(i, rng, 7000)) for i in range(rows)]
    plan = step(state, events)
    in_flight, times = plan, []
    for count in range(steps + WARM_UP):
        finished, in_flight = (in_flight, plan) if overlap and count else (plan, plan)
        ending = int(state.rows_by_priority[0]) if count % 8 == 4 else None
        events = [sample_tokens(state, finished, ending, rng)] if count or not overlap else []
        if ending is not None:
            events.append(Arrived(make_request(number, rng, 7000)))
            number += 1
        start = clock()
        plan = step(state, events)
        times.append(clock() - start)
    assert state.num_running == rows and int(state.row_counters[RowCounter.ACTIVE].sum()) == rows
    return sorted(times[WARM_UP:])


def make_record(
    what: str, page_size: int, times: list[float], overlap: bool = False
) -> dict[str, Any]:
    """The result as JSON, in microseconds, with its conditions."""
    return {
        "what": what,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": read_commit(Path(headstock.__file__)),
        "cpu": read_cpu_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rows": ROWS,
        "page_size": page_size,
        "overlap": overlap,
        "steps": len(times),
        "median_us": round(times[len(times) // 2] * 1e6, 1),
        "p99_us": round(times[int(len(times) * 0.99)] * 1e6, 1),
    }


def main() -> None:
    """Print a JSON object for the machine's own speed (columns.py), and one for each result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--output", metavar="FILE", help="append the objects to a file, one a line")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()
    records = [make_record("columns alone", 16, columns.measure_steps(ROWS, options.steps))]
    for size, overlap in ((64, False), (64, True), (16, False), (16, True)):
        records.append(
            make_record(
                "scheduler step", size, measure_steps(size, options.steps, ROWS, overlap), overlap
            )
        )
    added, _ = arrivals.measure_arrivals(options.steps // 4, same_prompt=False)
    records.append(make_record("arrival at 4,096 waiting", 64, added))
    added, steps = arrivals.measure_arrivals(options.steps // 4, same_prompt=True)
    records.append(make_record("arrival at 4,096 siblings", 64, added))
    records.append(make_record("scheduler step at 4,096 siblings", 64, steps))
    text = "".join(json.dumps(record) + "\n" for record in records)
    print(text, end="")
    if options.output is not None:
        with open(options.output, "a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
