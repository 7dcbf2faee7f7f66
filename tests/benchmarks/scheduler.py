"""What a scheduling step costs in steady decode: 256 rows, prefix index on, one request ending and one arriving every
8 steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import columns

import headstock
from headstock.bench.machine import commit, processor
from headstock.builtin.mixed import choose
from headstock.schedule import Arrived, Column, Event, Limits, Plan, Request, Sampled, State, initial, step
from headstock.spi import KVGroup

GROUP = KVGroup(layers=(0,), kind="full", kv_heads=1, head_dim=1)
ROWS = 256
STOP_IDS = (2, 3)
WARM_UP = 100
"""Steps that are not timed."""


def limits(page_size: int, rows: int, overlap: bool = False) -> Limits:
    """Room for every row at its longest, with the radix index on."""
    from headstock_radix_cache.plugin import spec

    module, name = spec().implementation.split(":")
    policy = getattr(__import__(module, fromlist=[name]), name)(page_size)
    pages = rows * (7000 // page_size) * 2
    return Limits(
        max_rows=rows,
        max_batch_tokens=1 << 20,
        max_len=8192,
        page_size=page_size,
        num_pages=(pages,),
        groups=(GROUP,),
        choose=choose,
        scheduler="mixed",
        policy=policy,
        overlap=overlap,
    )


def request(number: int, rng: np.random.Generator, max_tokens: int) -> Request:
    """A request of about a thousand prompt tokens that shares nothing."""
    prompt = rng.integers(10, 50_000, 1000 + number * 7 % 64).astype(np.int32)
    return Request(id=str(number), prompt=prompt, max_tokens=max_tokens, stop_ids=STOP_IDS)


def sampled(state: State, plan: Plan, ending: int | None, rng: np.random.Generator) -> Sampled:
    """Random tokens, a stop id for the row `ending`."""
    rows = plan.rows[plan.samples > 0]
    tokens = rng.integers(10, 50_000, len(rows)).astype(np.int32)
    if ending is not None:
        tokens[rows == ending] = STOP_IDS[0]
    return Sampled(rows, plan.orders[plan.samples > 0], None, tokens)


def measure(page_size: int, steps: int, rows: int = ROWS, overlap: bool = False) -> list[float]:
    """Seconds of each step, ascending. With `overlap` tokens are told one step late, as the engine does."""
    rng = np.random.default_rng(0)
    bounds = limits(page_size, rows, overlap)
    state = initial(bounds)
    number = rows
    # Lengths are spread, so that about as many pages fill in every step.
    events: list[Event] = [Arrived(request(i, rng, 7000)) for i in range(rows)]
    state, plan = step(state, events, bounds)
    flying, times = plan, []
    for count in range(steps + WARM_UP):
        landed, flying = (flying, plan) if overlap and count else (plan, plan)
        ending = int(state.ranked[0]) if count % 8 == 4 else None
        events = [sampled(state, landed, ending, rng)] if count or not overlap else []
        if ending is not None:
            events.append(Arrived(request(number, rng, 7000)))
            number += 1
        start = time.perf_counter()
        state, plan = step(state, events, bounds)
        times.append(time.perf_counter() - start)
    assert state.num_running == rows and int(state.columns[Column.ACTIVE].sum()) == rows
    return sorted(times[WARM_UP:])


def record(what: str, page_size: int, times: list[float]) -> dict[str, Any]:
    """The figure, in microseconds, with what it depends on."""
    return {
        "what": what,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(Path(headstock.__file__)),
        "cpu": processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rows": ROWS,
        "page_size": page_size,
        "steps": len(times),
        "median_us": round(times[len(times) // 2] * 1e6, 1),
        "p99_us": round(times[int(len(times) * 0.99)] * 1e6, 1),
    }


def main() -> None:
    """Print one JSON object for the measure of the machine (columns.py) and one for each page size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--output", metavar="FILE", help="append the objects to a file, one a line")
    asked = parser.parse_args()
    gc.collect()
    gc.freeze()
    records = [record("columns alone", 16, columns.measure(ROWS, asked.steps))]
    records += [record("scheduler step", size, measure(size, asked.steps)) for size in (64, 16)]
    text = "".join(json.dumps(one) + "\n" for one in records)
    print(text, end="")
    if asked.output is not None:
        with open(asked.output, "a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
