"""Searches that an engine as it should be survives, each a bounded number of random workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve
from core.schedule.toy import Drive, alone
from core.schedule.workloads import FULL, limits, prompt, random_requests, window
from core.schedule.workloads import request as scheduled
from toy_engine import Toys, Trial, random_settings, request
from toy_engine import random_requests as served

from headstock import SamplingParams
from headstock.builtin import mixed
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.schedule import Request
from headstock.spi import Budget, Choice, View

Hunt = Callable[[Toys], None]


def drive(requests: list[Request], **bounds: Any) -> Drive:
    """The scheduler alone, every state checked: all drain and say what they say alone."""
    drafts = any(one.fenced for one in requests)
    run = Drive(limits(**bounds), np.random.default_rng(0) if drafts else None)
    for one in requests:
        run.submit(one)
        run.step()
    run.drain(3_000)
    assert run.outputs == {one.id: alone(one) for one in requests}, "wrong tokens"
    return run


def scheduling(toys: Toys) -> None:
    """Random requests under pressure."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([1, 4, 16]))
        drive(
            random_requests(rng, fenced=seed % 4 == 3),
            page_size=size,
            num_pages=200 // size,
            max_rows=6,
            max_batch_tokens=int(rng.choice([3, 40])),
            overlap=seed % 3 > 0,
        )


def windows(toys: Toys) -> None:
    """Guesses that are wrong, in a model with a window."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        groups = (FULL, window(int(rng.integers(1, 12))))
        drive(random_requests(rng, fenced=True), groups=groups, page_size=1, num_pages=400, max_rows=4, overlap=True)


def ranks(toys: Toys) -> None:
    """The oldest of equal requests is never preempted, the others a bounded number of times."""
    rng = np.random.default_rng(0)
    requests = [scheduled(str(i), prompt(rng, 20), 100) for i in range(6)]
    run = Drive(limits(num_pages=45, max_rows=6))
    for one in requests:
        run.submit(one)
    preemptions: dict[str, int] = {}
    while run.busy and len(run.plans) < 3_000:
        run.step()
        preemptions |= {entry.request.id: entry.preemptions for entry in run.state.waiting}
        assert not preemptions.get("0"), "the oldest was preempted for a younger one"
    assert not run.busy, "still busy"
    assert 0 < max(preemptions.values()) <= sum(one.max_len // 4 for one in requests)


def pauses(toys: Toys) -> None:
    """A scheduler that runs nothing in every second step, and equal prompts."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        tokens = prompt(rng, 40)

        def choose(view: View, budget: Budget) -> Choice:
            nothing = view.number % 2
            return Choice(rows=view.ranked[:0], counts=view.ranked[:0]) if nothing else mixed.choose(view, budget)

        run = Drive(limits(choose=choose, num_pages=200, overlap=seed % 2 == 0))
        requests = [scheduled(str(i), tokens, int(rng.integers(5, 60))) for i in range(12)]
        for one in requests:
            run.submit(one)
        run.drain(3_000)
        assert run.outputs == {one.id: alone(one) for one in requests}, "wrong tokens"


def too_long(toys: Toys) -> None:
    """What can never fit is refused and holds nobody up."""
    rng = np.random.default_rng(0)
    run = Drive(limits(num_pages=10, max_len=1000))
    run.submit(scheduled("big", prompt(rng, 100), 12))
    run.submit(scheduled("small", prompt(rng, 5), 3))
    run.drain(200)
    assert run.reasons == {"big": "error", "small": "length"}


def repeats(toys: Toys) -> None:
    """A prompt that is cached to its end is served again."""
    tokens = prompt(np.random.default_rng(0), 20)
    run = drive([scheduled("a", tokens, 3)])
    run.submit(scheduled("b", tokens, 3))
    run.drain(200)
    assert run.outputs["b"] == run.outputs["a"]


def tenants(toys: Toys) -> None:
    """Nothing is shared between namespaces."""
    tokens = prompt(np.random.default_rng(0), 30)
    run = drive([scheduled("a", tokens, 3, namespace="one")])
    run.submit(scheduled("b", tokens, 3, namespace="two"))
    assert run.step().starts.tolist() == [0], "a tenant found what another had computed"


def serving(toys: Toys) -> None:
    """Random requests through the engine, free pages watched: nobody fails."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        settings = random_settings(rng) | {"overlap": seed % 3 > 0}
        engine = toys.engine(debug_canary=True, **settings)
        try:
            trial = Trial(engine).run(served(rng, 30, greedy=True))
        finally:
            engine.close()
        assert set(trial.reasons.values()) <= {"stop", "length"}, "a request failed that nothing was wrong with"


def neighbours(toys: Toys) -> None:
    """Sampled and penalized requests say the same alone and in company."""
    requests = served(np.random.default_rng(1), 40)
    outputs = []
    for rows in (1, 8):
        engine = toys.engine(max_running_requests=rows, num_pages=300)
        outputs.append(Trial(engine).run(requests).outputs)
        engine.close()
    assert outputs[0] == outputs[1], "tokens depend on neighbours"


def failures(toys: Toys) -> None:
    """Steps that raise fail the requests in them; whoever comes after finds nothing that was never computed."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, 50, 90)
        engine = toys.engine(faults=(f"execute@{seed + 1}",), page_size=4, num_pages=200, max_batch_tokens=20)
        try:
            Trial(engine).run([request("first", tokens, 20)])
            after = Trial(engine).run([request(str(i), tokens, 20) for i in range(3)])
        finally:
            engine.close()
        assert set(after.reasons.values()) == {"length"}, "a fault outlived its step"


def nan(toys: Toys) -> None:
    """A row of NaN fails alone."""
    engine = toys.engine(faults=("nan@4:2",))
    trial = Trial(engine).run(request(str(i), np.arange(9) + i, 12) for i in range(4))
    engine.close()
    assert list(trial.reasons.values()).count("error") == 1, "a row of NaN did not fail alone"


def nan_prefix(toys: Toys) -> None:
    """NaN in a chunk of a prompt is in nobody's prefix."""
    sizes = {"num_pages": 64, "max_batch_tokens": 32, "max_running_requests": 4}
    params = SamplingParams(temperature=0.0, logprobs=0)
    one = request("a", np.random.default_rng(1).integers(5, 500, 100), 4, params=params)
    outputs = []
    for faults in ((), ("nan@0:0",)):
        engine = Engine(EngineConfig(faults=faults, **sizes))
        Trial(engine).run([one])
        outputs.append(Trial(engine).run([evolve(one, id="b")]).outputs["b"])
        engine.close()
    assert outputs[0] == outputs[1], "wrong tokens after a prefix of NaN"


HUNTS: tuple[Hunt, ...] = (
    scheduling, windows, ranks, pauses, too_long, repeats, tenants, serving, neighbours, failures, nan, nan_prefix
)  # fmt: skip
