"""One round of random work through an engine: who comes, who leaves, and what must come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, evolve, field
from toy_engine import GREEDY, LONGEST, EngineHarness, request

from headstock.errors import RequestError
from headstock.scheduler import Request

KINDS = ("nan@{}:{}", "execute@{}", "wait@{}")


@define
class Round:
    """Requests come while others run, some are aborted or asked again, a tenth is bad; now and then
    prefixes go.

    `name` begins the ids of its requests; `faults` are those that may happen in its engine.
    """

    harness: EngineHarness
    rng: np.random.Generator
    name: str
    todo: list[Request]
    aborted: set[str] = field(factory=set)
    faults: tuple[str, ...] = ()
    offered: int = 0
    refused: int = 0

    def run(self) -> None:
        """Work until no request is left.   raises: AssertionError"""
        harness, often = self.harness, float(self.rng.choice([0.2, 0.5, 1.0]))
        while self.todo or harness.engine.has_work:
            while self.todo and self.rng.random() < often:
                self.come(self.todo.pop())
                often = min(often, 0.9)
            self.leave()
            harness.step()
            late = self.aborted - harness.reasons.keys()
            assert not late, f"{late} were aborted and run on"
            assert harness.steps < 20_000, f"{harness.engine.config} does not end"
        harness.drain()
        self.judge()

    def come(self, one: Request) -> None:
        """A request, and now and then a bad one before it, one that was there before, or the next
        turn of a talk.
        """
        rng, reasons = self.rng, self.harness.reasons
        if rng.random() < 0.1:
            self.offer_bad(one)
        self.offer(one)
        if reasons and rng.random() < 0.15:
            failed = [name for name, reason in reasons.items() if reason == "error"]
            self.offer(self.harness.requests[str(rng.choice(failed or list(reasons)))])
        if reasons and rng.random() < 0.1:
            self.offer(self.follow_up(str(rng.choice(list(reasons)))))

    def leave(self) -> None:
        """Now and then someone is aborted, who may have ended, or all prefixes are forgotten."""
        if self.harness.requests and self.rng.random() < 0.05:
            name = str(self.rng.choice(list(self.harness.requests)))
            self.harness.engine.abort(name)
            self.aborted |= {name} - self.harness.reasons.keys()
        if self.rng.random() < 0.01:
            self.harness.engine.reset_prefix_cache()

    def offer(self, one: Request) -> None:
        """Submit a request under a new id, which an engine may refuse when it is told to refuse
        under pressure.
        """
        self.offered += 1
        self.refused += not self.harness.try_submit(evolve(one, id=f"{self.name}{self.offered}"))

    def follow_up(self, name: str) -> Request:
        """A request that goes on from one that has ended, as the next turn of a talk does."""
        last = self.harness.requests[name]
        tokens = [
            *last.prompt.tolist(),
            *self.harness.outputs[name],
            int(self.rng.integers(0, 50)),
        ][: LONGEST - 10]
        return request("next", tokens, 10, params=GREEDY, namespace=last.namespace)

    def offer_bad(self, one: Request) -> None:
        """Submit a request that no engine takes."""
        bad = [
            request("empty", []),
            request("unknown", [999]),
            request("negative", [-1]),
            evolve(one, id="long", max_tokens=10_000),
            request("nothing", [1], 0),
        ]
        try:
            self.harness.engine.submit(bad[int(self.rng.integers(len(bad)))])
        except RequestError:
            self.refused += 1
            return
        raise AssertionError("a bad request was taken")

    def judge(self) -> None:
        """Who was not aborted was not ended so, and no more failed than the faults can have hit."""
        reasons = self.harness.reasons
        ended = {name for name, reason in reasons.items() if reason == "abort"}
        assert ended <= self.aborted, f"{ended - self.aborted} ended as if aborted"
        rows = self.harness.engine.limits.max_rows
        most = sum(1 if fault.startswith("nan") else rows for fault in self.faults)
        failed = list(reasons.values()).count("error")
        assert failed <= most, (
            f"{failed} requests failed and the faults {self.faults} hit {most} at most"
        )


def random_modes(rng: np.random.Generator) -> dict[str, Any]:
    """Faults, and now and then a mode that replays, keeps less, refuses more or watches free
    pages.
    """
    modes: dict[str, Any] = {"faults": random_faults(rng), "debug_canary": bool(rng.random() < 0.3)}
    if rng.random() < 0.4:
        modes["runner"] = "rerun"
    if rng.random() < 0.4:
        modes |= {"proposer": "guess", "opt": (f"guess.right={rng.choice([0.0, 0.7, 1.0])}",)}
    if rng.random() < 0.2:
        modes["prefix_cache_n"] = int(rng.integers(0, 3))
    if rng.random() < 0.1:
        # every token again in every step
        modes |= {"kv_cache": False, "max_batch_tokens": 512, "proposer": "off", "opt": ()}
    if rng.random() < 0.2:
        modes |= {"on_pressure": "reject", "memory_threshold": float(rng.choice([0.3, 0.6, 0.9]))}
    return modes


def random_faults(rng: np.random.Generator) -> tuple[str, ...]:
    """Up to four faults in half of the engines, of NaN alone in half of those."""
    count = int(rng.integers(1, 5)) if rng.random() < 0.5 else 0
    kinds = KINDS[:1] if rng.random() < 0.5 else KINDS
    return tuple(
        str(rng.choice(kinds)).format(rng.integers(0, 60), rng.integers(0, 8)) for _ in range(count)
    )
