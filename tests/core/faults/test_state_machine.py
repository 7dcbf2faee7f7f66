"""The real engine under any treatment: arrivals, steps, aborts, faults and resets in any order."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from core.schedule.toy import VOCAB
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from toy_engine import LONGEST, Trial, installed, request

from headstock.errors import CapacityError

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50)
FAULTS = st.lists(
    st.one_of(
        st.builds("nan@{}:{}".format, st.integers(0, 30), st.integers(0, 4)),
        st.builds("execute@{}".format, st.integers(0, 30)),
        st.builds("wait@{}".format, st.integers(0, 30)),
    ),
    max_size=3,
)


class Serving(RuleBasedStateMachine):
    """An engine whose every step is checked and whose free pages are watched; each answer is judged as it ends."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)  # injected faults are logged with their tracebacks
        self.folder = tempfile.TemporaryDirectory()
        self.context = installed(Path(self.folder.name))
        self.toys = self.context.__enter__()

    @initialize(
        size=st.sampled_from([1, 4, 16]),
        pages=st.integers(5, 40),
        rows=st.integers(1, 5),
        tokens=st.sampled_from([1, 5, 30]),
        cache=st.sampled_from(["radix", "naive"]),
        scheduler=st.sampled_from(["mixed", "prefill-first", "decode-first"]),
        window=st.one_of(st.none(), st.integers(1, 30)),
        overlap=st.booleans(),
        faults=FAULTS,
    )
    def start(self, size: int, pages: int, rows: int, tokens: int, cache: str, **more: Any) -> None:
        sizes = {"page_size": size, "num_pages": pages, "max_running_requests": rows, "max_batch_tokens": rows + tokens}
        length = min(LONGEST, size * pages)
        engine = self.toys.engine(cache_type=cache, max_seq_len=length, debug_canary=True, **sizes, **more)
        self.trial = Trial(engine)
        self.refused: set[str] = set()

    @rule(
        tokens=TOKENS, most=st.integers(1, 20), priority=st.integers(0, 2), shared=st.booleans(), stop=st.integers(0, 9)
    )
    def arrive(self, tokens: list[int], most: int, priority: int, shared: bool, stop: int) -> None:
        name = str(len(self.trial.requests) + len(self.refused))
        prompt = list(range(20)) + tokens if shared else tokens
        one = request(name, prompt, most, priority=priority, stop_ids=(stop,), min_tokens=most // 3)
        try:
            self.trial.submit(one)
        except CapacityError:
            del self.trial.requests[name], self.trial.outputs[name]
            self.refused.add(name)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.trial.step()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.trial.engine.abort(str(which))

    @rule()
    def reset(self) -> None:
        self.trial.engine.reset_prefix_cache()

    @invariant()
    def caps_hold(self) -> None:
        if hasattr(self, "trial"):
            state, limits = self.trial.engine.state, self.trial.engine.limits
            assert state.num_running <= limits.max_rows
            ids = [entry.request.id for entry in (*state.seats, *state.waiting) if entry is not None]
            assert len(ids) == len(set(ids)) and not set(ids) & set(self.trial.reasons)

    def teardown(self) -> None:
        try:
            if hasattr(self, "trial"):
                self.trial.drain()
                self.trial.engine.close()
        finally:
            self.context.__exit__(None, None, None)
            self.folder.cleanup()
            logging.disable(logging.NOTSET)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
