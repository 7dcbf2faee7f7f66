"""Random engines and requests for the scheduler's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstock.builtin import decode_first, equal_length, mixed, prefill_first
from headstock.schedule import Limits, Request
from headstock.spi import CachePolicy, Choose, KVGroup
from headstock_radix_cache.policy import RadixCache

from .toy import VOCAB

SCHEDULERS: dict[str, Choose] = {
    "mixed": mixed.choose,
    "prefill-first": prefill_first.choose,
    "decode-first": decode_first.choose,
    "equal-length": equal_length.choose,
}
FULL = KVGroup(layers=(0,), kind="full", kv_heads=1, head_dim=1)


def window(length: int) -> KVGroup:
    """A second group that sees the latest `length` tokens."""
    return KVGroup(layers=(1,), kind="window", kv_heads=1, head_dim=1, window=length)


def limits(**changes: Any) -> Limits:
    """Small limits, radix index on unless `policy` or several groups say otherwise."""
    size = changes.setdefault("page_size", 4)
    groups = changes.setdefault("groups", (FULL,))
    changes["num_pages"] = (changes.get("num_pages", 100),) * len(groups)
    scheduler = changes.setdefault("scheduler", "mixed")
    policy: CachePolicy | None = RadixCache(size) if len(groups) == 1 else None
    defaults = {"max_rows": 8, "max_batch_tokens": 64, "max_len": 160, "policy": policy, "check": True}
    return Limits(**(defaults | {"choose": SCHEDULERS[scheduler]} | changes))


def prompt(rng: np.random.Generator, length: int) -> np.ndarray:
    """Random tokens."""
    return rng.integers(0, VOCAB, length).astype(np.int32)


def request(id: str, tokens: np.ndarray | list[int], max_tokens: int = 5, **changes: Any) -> Request:
    """A request for the toy model."""
    return Request(id=id, prompt=np.asarray(tokens, np.int32), max_tokens=max_tokens, **changes)


def random_limits(rng: np.random.Generator, scheduler: str) -> Limits:
    """An engine of any shape that can serve every request of `random_requests`."""
    size = int(rng.choice([1, 4, 16]))
    groups = (FULL, window(int(rng.integers(1, 40)))) if rng.random() < 0.25 else (FULL,)
    reuse = len(groups) == 1 and rng.random() < 0.7
    return limits(
        max_rows=int(rng.integers(1, 17)),
        max_batch_tokens=int(rng.choice([3, 17, 64, 512])),
        page_size=size,
        num_pages=int(rng.integers(160 // size, 400 // size)),
        groups=groups,
        scheduler=scheduler,
        policy=RadixCache(size) if reuse else None,
        overlap=bool(rng.random() < 0.5),
        check=False,
    )


def random_requests(rng: np.random.Generator, fenced: bool) -> list[Request]:
    """Up to 30 requests, half of which share a prefix of some length."""
    shared = prompt(rng, 60)
    requests = []
    for number in range(int(rng.integers(1, 30))):
        tokens = prompt(rng, int(rng.integers(1, 100)))
        if rng.random() < 0.5:
            tokens = np.concatenate([shared[: int(rng.integers(1, 60))], tokens[:40]])
        most = int(rng.integers(1, min(60, 160 - len(tokens)) + 1))
        requests.append(
            request(
                str(number),
                tokens,
                most,
                min_tokens=int(rng.integers(0, most + 1)),
                stop_ids=tuple(rng.integers(0, VOCAB, int(rng.integers(0, 3))).tolist()),
                priority=int(rng.integers(0, 3)) if rng.random() < 0.5 else 0,
                fenced=fenced,
                prompt_logprobs=rng.random() < 0.1,
            )
        )
    return requests
