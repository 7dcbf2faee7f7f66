"""The real engine on the toy model: random engines, random requests, and what must come out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_plugins
from attrs import define, evolve, field, frozen
from fault_injection import FaultInjector

from headstock import SamplingParams
from headstock.callbacks import ProgressCallback
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import CapacityError
from headstock.scheduler import PoolingKind, Request, RowCounter
from headstock.scheduler.invariants import check_state
from headstock_conformance.scheduler.toy_device import VOCAB, hash_prefixes, next_token
from headstock_conformance.scheduler.transitions import TransitionChecker

GREEDY = SamplingParams(temperature=0.0)
LONGEST = 160
"""Tokens of a request at most."""


@frozen
class Toys:
    """A folder on `sys.path` with the toy plugins."""

    folder: Path

    def engine(
        self,
        *,
        window: int | None = None,
        state: bool = False,
        report: ProgressCallback | None = None,
        faults: Iterable[str] = (),
        **settings: Any,
    ) -> Engine:
        """A small engine in which these faults happen; every step is checked unless `settings` say
        otherwise.
        """
        small = {
            "num_pages": 100,
            "page_size": 4,
            "max_running_requests": 8,
            "max_batch_tokens": 64,
            "overlap": True,  # as on a GPU
        }
        parts = {
            "attn": "toy",
            "ops": "toy",
            "runner": "eager",
            "load_format": "dummy",
            "max_seq_len": LONGEST,
        }
        model = str(toy_plugins.install(self.folder, window, state=state))
        return Engine(
            EngineConfig(model=model, **({"debug_invariants": True} | parts | small | settings)),
            report,
            FaultInjector.parse(faults),
        )


@contextmanager
def installed(folder: Path) -> Iterator[Toys]:
    """The toys, installed in `folder` as long as the context lasts."""
    toy_plugins.install(folder)
    sys.path.insert(0, str(folder))
    try:
        yield Toys(folder)
    finally:
        sys.path.remove(str(folder))


def request(
    name: str, prompt: Sequence[int] | np.ndarray, max_tokens: int = 8, **changes: Any
) -> Request:
    """A greedy request."""
    return Request(
        id=name,
        prompt=np.asarray(prompt, np.int32),
        max_tokens=max_tokens,
        **({"params": GREEDY} | changes),
    )


def expected(request: Request) -> list[int]:
    """The output of a greedy request: a stop id that comes too early gives way to the next best
    token.
    """
    history = [int(token) for token in request.prompt]
    for count in range(request.max_tokens):
        token = next_token(history)
        while count < request.min_tokens and token in request.stop_ids:
            token = (token + 1) % VOCAB
        history.append(token)
        if token in request.stop_ids:
            break
    return history[len(request.prompt) :]


def pool(request: Request) -> float:
    """The one number of a pooling request's vector: the toy's hidden state is its next token."""
    states = [hash % VOCAB for hash in hash_prefixes(request.prompt)]
    return sum(states) / len(states) if request.pooling == "mean" else states[-1]


@define
class EngineHarness:
    """Drives an engine and records its updates; checks the output of each request as it ends.

    sampled: the longest output by prompt and settings, for requests that are not greedy
    """

    engine: Engine
    requests: dict[str, Request] = field(factory=dict)
    outputs: dict[str, list[int]] = field(factory=dict)
    reasons: dict[str, str] = field(factory=dict)
    preemptions: dict[str, int] = field(factory=dict)
    sampled: dict[tuple[Any, ...], list[int]] = field(factory=dict)
    embeddings: dict[str, tuple[float, ...]] = field(factory=dict)
    steps: int = 0
    transitions: TransitionChecker = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.transitions = TransitionChecker(self.engine.limits)
        self.transitions.check_state(self.engine.state)

    def submit(self, one: Request) -> None:
        """Submit a request."""
        self.engine.submit(one)
        self.requests[one.id], self.outputs[one.id] = one, []

    def try_submit(self, one: Request) -> bool:
        """Submit a request that fits the engine; False when `--on-pressure reject` refused it."""
        config = self.engine.config
        full = config.on_pressure == "reject" and self.memory_pressure >= config.memory_threshold
        try:
            self.submit(one)
        except CapacityError:
            is_accepted = False
        else:
            is_accepted = True
        assert is_accepted != full, (
            f"{one.id} was {'accepted' if is_accepted else 'refused'} though full is {full}"
        )
        return is_accepted

    @property
    def memory_pressure(self) -> float:
        """The share of the pool that running requests hold and waiting ones need."""
        state, limits = self.engine.state, self.engine.limits
        used_pages = {page for pages in state.pages[0] for page in pages.tolist()}
        lengths = {
            name: len(self.requests[name].prompt)
            for name in self.requests.keys() - self.reasons.keys()
        }
        lengths |= {entry.request.id: len(entry.tokens) for entry in state.waiting}
        running = {entry.request.id for entry in state.requests_by_row if entry is not None}
        needed = sum(
            limits.pages_for(length) for name, length in lengths.items() if name not in running
        )
        # A prompt in chunks holds what it computed so far; the rest is needed all the same.
        counters = state.row_counters
        for row, pages in enumerate(state.pages[0]):
            known = int(counters[RowCounter.NUM_KNOWN, row])
            if counters[RowCounter.NUM_COMPUTED, row] < known - 1:
                needed += max(limits.pages_for(known) - len(pages), 0)
        return min((len(used_pages) + needed) / limits.num_pages[0], 1.0)

    def step(self) -> None:
        """Step the engine and record its updates."""
        self.steps += 1
        for update in self.engine.step():
            self.outputs[update.id] += update.tokens
            if update.embedding is not None:
                self.embeddings[update.id] = update.embedding
            if update.finish_reason is not None:
                assert update.id not in self.reasons, f"{update.id} ended twice"
                self.reasons[update.id], self.preemptions[update.id] = (
                    update.finish_reason,
                    update.preemptions,
                )
                self.check_output(self.requests[update.id])
        self.transitions.check_state(self.engine.state)

    def check_output(self, one: Request) -> None:
        """Raise AssertionError unless a request has the output that it has alone.

        Outputs with the same prompt and settings must be prefixes of one another.
        """
        output = self.outputs[one.id]
        if one.pooling:
            assert not output, f"{one.id} pools, and yet it said {output}"
            ended = self.reasons[one.id] == "stop"
            found = self.embeddings.get(one.id)
            assert found == (pytest.approx((pool(one),), abs=1e-4) if ended else None), (
                f"{one.id} pooled {found} and not {pool(one)}"
            )
            return
        if one.params != GREEDY:
            key = (one.prompt.tobytes(), repr(one.params), one.stop_ids, one.min_tokens)
            longest = self.sampled[key] = max(self.sampled.get(key, []), output, key=len)
            assert output == longest[: len(output)], (
                f"{one.id} said {output} and not {longest}, as one that asked the same"
            )
            return
        wanted = expected(one)
        if self.reasons[one.id] in ("stop", "length"):
            assert output == wanted, f"{one.id} said {output} and not {wanted}"
        else:
            assert output == wanted[: len(output)], f"{one.id} had said {output} of {wanted}"

    def drain(self, most: int = 20_000) -> EngineHarness:
        """Step until all requests have ended; the engine must hold no pages then."""
        for _ in range(most):
            if not self.engine.has_work:
                break
            self.step()
        stats = self.engine.stats()
        assert not self.engine.has_work, (
            f"{stats.running} running and {stats.waiting} waiting after {most} steps"
        )
        assert self.reasons.keys() == self.requests.keys()
        check_state(self.engine.state, self.engine.limits)
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        return self

    def run(self, requests: Iterable[Request]) -> EngineHarness:
        """Submit all at once and drain."""
        for one in requests:
            self.submit(one)
        return self.drain()


SCHEDULERS = ("mixed", "prefill-first", "decode-first", "equal-length")


def to_pooling(one: Request, kind: PoolingKind) -> Request:
    """The request, changed to pool its prompt."""
    return evolve(one, max_tokens=0, min_tokens=0, stop_ids=(), params=GREEDY, pooling=kind)


def contiguous(rows: int, regions: int) -> dict[str, Any]:
    """The settings of an engine with so many regions, at least one and at most one a row."""
    return {"paged_attn": "off", "page_size": "auto", "num_pages": max(1, min(regions, rows))}


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    """An engine of any shape that can serve every request of `random_requests`, often with too few
    pages for all.
    """
    size = int(rng.choice([1, 4, 16]))
    rows = int(rng.integers(1, 17))
    settings = {
        "page_size": size,
        "num_pages": int(rng.integers(LONGEST // size, 400 // size)),
        "max_running_requests": rows,
        "max_batch_tokens": int(rng.choice([rows, 17, 64, 512])) + rows,
        "scheduler": str(rng.choice(SCHEDULERS)),
        "cache_type": str(rng.choice(["radix", "radix", "naive"])),
        "overlap": bool(rng.random() < 0.7),
        "window": int(rng.integers(1, 40)) if rng.random() < 0.2 else None,
    }
    if rng.random() < 0.2:
        settings |= contiguous(rows, int(rng.integers(1, 17)))
    return settings


def random_requests(
    rng: np.random.Generator, count: int, *, greedy: bool = False, pooled: float = 0.0
) -> list[Request]:
    """Requests of all kinds, half of which share a prefix of some length and some of which come
    several times over. A share of them is `pooled`.
    """
    shared = rng.integers(0, VOCAB, 60)
    requests: list[Request] = []
    while len(requests) < count:
        tokens = rng.integers(0, VOCAB, int(rng.integers(1, 90)))
        if rng.random() < 0.5:
            tokens = np.concatenate([shared[: int(rng.integers(1, 60))], tokens[:40]])
        most = int(rng.integers(1, 40))
        one = request(
            str(len(requests)),
            tokens,
            most,
            min_tokens=int(rng.integers(0, most + 1)) if rng.random() < 0.5 else 0,
            stop_ids=tuple(rng.integers(0, VOCAB, int(rng.integers(0, 4))).tolist()),
            priority=int(rng.integers(0, 3)) if rng.random() < 0.3 else 0,
            namespace="other" if rng.random() < 0.1 else "",
            params=GREEDY if greedy else random_params(rng),
        )
        if pooled and rng.random() < pooled:
            kind: PoolingKind = "mean" if rng.random() < 0.5 else "last"
            one = to_pooling(one, kind)
        requests += [
            evolve(one, id=f"{one.id}.{i}", params=again(one.params, i))
            for i in range(rng.choice([1, 1, 3]))
        ]
    return requests[:count]


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Greedy half of the time, else sampled, penalized or both."""
    if rng.random() < 0.5:
        return GREEDY
    warm = (
        {"temperature": float(rng.choice([0.5, 1.5])), "seed": int(rng.integers(0, 99))}
        if rng.random() < 0.7
        else {}
    )
    penalties = {"frequency_penalty": 1.5, "repetition_penalty": 1.2} if rng.random() < 0.5 else {}
    return SamplingParams(**({"temperature": 0.0} | warm | penalties))


def again(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of one of several answers to a prompt: as `n` makes them, each with a seed of
    its own.
    """
    return params if params.seed is None else evolve(params, seed=params.seed + number)
