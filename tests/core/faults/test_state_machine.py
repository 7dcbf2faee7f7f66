"""The real engine under any treatment: arrivals, steps, aborts, faults and resets in any order."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from often import often
from toy_engine import LONGEST, SCHEDULERS, EngineHarness, contiguous, installed, request

from headstock.errors import CapacityError
from headstock.scheduler import Request, find_refusal
from headstock_conformance.scheduler.toy_device import VOCAB

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50)
FAULTS = st.lists(
    st.one_of(
        st.builds("nan@{}:{}".format, st.integers(0, 30), st.integers(0, 4)),
        st.builds("execute@{}".format, st.integers(0, 30)),
        st.builds("wait@{}".format, st.integers(0, 30)),
    ),
    max_size=3,
)


MODES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"cache_type": st.just("naive")}),
    st.fixed_dictionaries({"prefix_cache_n": st.integers(0, 2)}),
    st.fixed_dictionaries({"kv_cache": st.just(False)}),
    st.fixed_dictionaries(
        {"on_pressure": st.just("reject"), "memory_threshold": st.sampled_from([0.3, 0.6, 0.9])}
    ),
    st.fixed_dictionaries(
        {"paged_attn": st.just("off"), "cache_type": st.sampled_from(["radix", "naive"])}
    ),
)
"""What an engine keeps of requests that ended, and whether it refuses some."""


class Serving(RuleBasedStateMachine):
    """An engine of any mode. Every step is checked, free pages are watched, and each answer is
    judged as it ends.
    """

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
        modes=MODES,
        scheduler=st.sampled_from(SCHEDULERS),
        window=st.one_of(st.none(), st.integers(1, 30)),
        overlap=st.booleans(),
        faults=FAULTS,
    )
    def start(
        self, size: int, pages: int, rows: int, tokens: int, modes: dict[str, Any], **more: Any
    ) -> None:
        sizes = {"page_size": size, "num_pages": pages, "max_seq_len": min(LONGEST, size * pages)}
        if "paged_attn" in modes:
            sizes = {"max_seq_len": LONGEST} | contiguous(rows, pages)
        if "kv_cache" in modes:
            # every token computes its whole history again, which a token at a time takes minutes
            tokens = 30
        budget = {"max_running_requests": rows, "max_batch_tokens": rows + tokens}
        self.harness = EngineHarness(
            self.toys.engine(debug_canary=True, **(budget | modes | sizes), **more)
        )
        self.refused = 0

    @rule(
        tokens=TOKENS,
        most=st.integers(1, 20),
        shared=st.booleans(),
        stop=st.integers(0, 9),
        n=st.sampled_from([1, 1, 3]),
        priority=st.integers(0, 2),
        namespace=st.sampled_from(["", "other"]),
    )
    def arrive(
        self, tokens: list[int], most: int, shared: bool, stop: int, n: int, **more: Any
    ) -> None:
        """A request, or several that ask for the same."""
        prompt = list(range(20)) + tokens if shared else tokens
        for _ in range(n):
            self.offer(
                request(self.name(), prompt, most, stop_ids=(stop,), min_tokens=most // 3, **more)
            )

    @rule(which=st.integers(0, 30), token=st.integers(0, VOCAB - 1), most=st.integers(1, 20))
    def go_on(self, which: int, token: int, most: int) -> None:
        """The next turn of a talk."""
        if ended := list(self.harness.reasons):
            last = ended[which % len(ended)]
            prompt = [
                *self.harness.requests[last].prompt.tolist(),
                *self.harness.outputs[last],
                token,
            ]
            self.offer(
                request(self.name(), prompt, most, namespace=self.harness.requests[last].namespace)
            )

    def name(self) -> str:
        return str(len(self.harness.requests) + self.refused)

    def offer(self, one: Request) -> None:
        """Hand a request in, or see it refused: it is too long, or the engine is told to refuse
        when it is full.
        """
        if find_refusal(one, self.harness.engine.limits) is None:
            self.refused += not self.harness.try_submit(one)
            return
        self.refused += 1
        with pytest.raises(CapacityError):
            self.harness.submit(one)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.harness.step()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.harness.engine.abort(str(which))

    @rule()
    def reset(self) -> None:
        self.harness.engine.reset_prefix_cache()

    @invariant()
    def caps_hold(self) -> None:
        if hasattr(self, "harness"):
            state, limits = self.harness.engine.state, self.harness.engine.limits
            assert state.num_running <= limits.max_rows
            ids = [
                entry.request.id
                for entry in (*state.requests_by_row, *state.waiting)
                if entry is not None
            ]
            assert len(ids) == len(set(ids)) and not set(ids) & set(self.harness.reasons)

    def teardown(self) -> None:
        try:
            if hasattr(self, "harness"):
                self.harness.drain()
                self.harness.engine.close()
        finally:
            self.context.__exit__(None, None, None)
            self.folder.cleanup()
            logging.disable(logging.NOTSET)


@pytest.mark.feature("I12", "I13", "I15")
@pytest.mark.parametrize("examples", often(1, [10, 100]))
def test_the_engine_survives_any_treatment_and_nothing_is_left_behind(examples: int) -> None:
    run_state_machine_as_test(
        Serving, settings=settings(max_examples=examples, stateful_step_count=25)
    )
