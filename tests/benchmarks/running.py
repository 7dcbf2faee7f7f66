"""A scheduler in steady decode, to be timed: each row samples one token a step."""

from __future__ import annotations

import numpy as np

from headstock.builtin.mixed import schedule
from headstock.scheduler import Limits, Plan, Request, Sampled, State
from headstock.spi import FullKV, KVGroup

GROUP = KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1))
ROWS = 256
STOP_IDS = (2, 3)


def make_limits(page_size: int, rows: int, overlap: bool = False) -> Limits:
    """Limits with pages for every row at its longest, and the radix index."""
    from headstock_radix_cache.plugin import spec

    module, name = spec().implementation.split(":")
    policy = getattr(__import__(module, fromlist=[name]), name)(page_size, (GROUP,))
    pages = rows * (7000 // page_size) * 2
    return Limits(
        max_rows=rows,
        max_batch_tokens=1 << 20,
        max_len=8192,
        page_size=page_size,
        num_pages=(pages,),
        groups=(GROUP,),
        schedule=schedule,
        scheduler="mixed",
        policy=policy,
        overlap=overlap,
    )


def make_request(number: int, rng: np.random.Generator, max_tokens: int) -> Request:
    """A request of about 1,000 prompt tokens, without a prefix in common with others."""
    prompt = rng.integers(10, 50_000, 1000 + number * 7 % 64).astype(np.int32)
    return Request(id=str(number), prompt=prompt, max_tokens=max_tokens, stop_ids=STOP_IDS)


def sample_tokens(
    state: State, plan: Plan, ending: int | None, rng: np.random.Generator
) -> Sampled:
    """Random tokens, and a stop id for the row `ending`."""
    rows = plan.rows[plan.samples > 0]
    tokens = rng.integers(10, 50_000, len(rows)).astype(np.int32)
    if ending is not None:
        tokens[rows == ending] = STOP_IDS[0]
    return Sampled(rows, plan.admission_ids[plan.samples > 0], None, tokens)
