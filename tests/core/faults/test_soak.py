"""A minute of random work, and the least rounds of it always."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from toy_engine import Toys

from headstock.engine.output_tracker import OutputTracker
from headstock.engine.tracked_request import TrackedRequest

from .soak import soak


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Injected faults are logged with their tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.full  # the session `soak` runs it too, for longer
@pytest.mark.parametrize("seconds", [0, 60])
def test_any_mix_of_requests_aborts_and_faults_leaves_nothing_behind(
    toys: Toys, seconds: int
) -> None:
    tally = soak(seconds, toys, seed=17)

    assert tally.requests > 100 and tally.preempted
    assert tally.aborted and tally.failed and tally.refused


@pytest.mark.parametrize(
    ("seconds", "leak", "message"),
    [
        (0, lambda account: account, "left behind: .*tracked_request.TrackedRequest"),
        pytest.param(
            60,
            lambda account: np.zeros(512, np.int32),
            "blocks of memory were left",
            marks=pytest.mark.full,
        ),
    ],
    ids=["an object", "2 KiB"],
)
def test_what_every_request_leaves_behind_is_noticed(
    toys: Toys,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    leak: Callable[[TrackedRequest], object],
    message: str,
) -> None:
    leaked: list[object] = []
    unseat = OutputTracker.clear_admission

    def leaving(self: OutputTracker, account: TrackedRequest) -> None:
        leaked.append(leak(account))
        unseat(self, account)

    monkeypatch.setattr(OutputTracker, "clear_admission", leaving)
    with pytest.raises(AssertionError, match=message):
        soak(seconds, toys, seed=13)
