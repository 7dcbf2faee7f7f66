"""The demo model in a small engine, and random requests for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstock import SamplingParams
from headstock.engine.engine import Engine
from headstock.outputs import Update
from headstock.scheduler import Request

SMALL = {"num_pages": 256, "max_running_requests": 16}
SEED = 5
RNG = np.random.default_rng(SEED)


def request(name: str, length: int = 20, max_tokens: int = 8, **params: Any) -> Request:
    """A request of random tokens."""
    settings = SamplingParams(**({"temperature": 0.0} | params))
    prompt = RNG.integers(5, 500, length).astype(np.int32)
    return Request(
        id=name,
        prompt=prompt,
        max_tokens=max_tokens,
        params=settings,
        prompt_logprobs=settings.prompt_logprobs is not None,
    )


def drain(engine: Engine, *requests: Request) -> dict[str, list[Update]]:
    """Submit, run to the end, and sort the updates by request."""
    for one in requests:
        engine.submit(one)
    by_request: dict[str, list[Update]] = {one.id: [] for one in requests}
    while engine.has_work:
        for update in engine.step():
            by_request[update.id].append(update)
    return by_request


def tokens(updates: list[Update]) -> list[int]:
    """All output tokens."""
    return [token for update in updates for token in update.tokens]
