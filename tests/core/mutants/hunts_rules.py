"""Searches for neglected rules; an engine as it should be survives them too."""

from __future__ import annotations

import contextlib

import numpy as np
from core.faults.soak import soak
from core.schedule.toy import Drive
from core.schedule.workloads import limits, prompt
from core.schedule.workloads import request as scheduled
from toy_engine import Toys, Trial, random_requests, request
from toy_text import toy_llm

from headstock import RequestError, SamplingParams

NAMES = ("1", "10", "100")


def aborts(toys: Toys) -> None:
    """An abort ends the request of that id, wherever it is, and no other; one that comes late does nothing."""
    engine = toys.engine(max_running_requests=2)
    try:
        for steps in (0, 2, 5, 30):
            trial = Trial(engine)
            for number, name in enumerate(NAMES):
                trial.submit(request(name, np.arange(9) + number, 12))
            for _ in range(steps):
                trial.step()
            late = "1" in trial.reasons
            for name in ("1", "1", "unknown"):
                engine.abort(name)
            for _ in range(3):
                trial.step()
            assert "1" in trial.reasons, "it runs on though aborted"
            trial.drain()
            assert trial.reasons["1"] == ("length" if late else "abort")
            assert {trial.reasons[name] for name in NAMES[1:]} == {"length"}, "it was not to be aborted"
    finally:
        engine.close()


def large_head(toys: Toys) -> None:
    """A request as large as the pool is served when the others have ended, and so are those behind it."""
    rng = np.random.default_rng(2)
    run = Drive(limits(num_pages=12, max_rows=4))
    for one in (("early", 8, 12), ("big", 48, 1), ("late", 5, 3)):
        name, length, most = one
        run.submit(scheduled(name, prompt(rng, length), most))
        run.step()
    run.drain(200)
    assert set(run.reasons.values()) == {"length"}


def replays(toys: Toys) -> None:
    """Replayed steps of any number of rows write to no page but their rows' own."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        sizes = {"max_running_requests": 13, "max_batch_tokens": 40, "num_pages": 200}
        engine = toys.engine(runner="rerun", debug_canary=True, cache_type="naive", **sizes)
        try:
            trial = Trial(engine).run(random_requests(rng, 40, greedy=True))
        finally:
            engine.close()
        assert set(trial.reasons.values()) <= {"stop", "length"}, "a request failed that nothing was wrong with"


def extreme_ids(toys: Toys) -> None:
    """Ids past the vocabulary are refused, and who runs beside them stays itself."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with toy_llm(toys.folder) as llm:
        asked = {"prompt_token_ids": [1, 2, 3]}
        (whole,) = llm.generate(asked, params)[0].outputs
        stream = llm.stream(asked, params)
        said = list(next(stream).outputs[0].token_ids)
        refused = True
        with contextlib.suppress(RequestError):
            llm.generate({"prompt_token_ids": [4]}, SamplingParams(max_tokens=2, logit_bias={50: 1.0}))
            refused = False
        said += [token for piece in stream for token in piece.outputs[0].token_ids]
    assert tuple(said) == whole.token_ids, "the victim is not itself"
    assert refused, "an id past the vocabulary was taken"


def closing(toys: Toys) -> None:
    """Engines that are closed leave no thread and no file behind."""
    soak(1.5, toys, seed=4)


HUNTS_OF_RULES = (aborts, large_head, replays, extreme_ids, closing)
