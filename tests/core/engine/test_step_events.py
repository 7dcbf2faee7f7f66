"""What a step's sample says of its rows: drafts accepted, rows that failed, and those that pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import toy_proposer
from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from headstock.engine.drafting import Drafting
from headstock.engine.output_tracker import OutputTracker
from headstock.engine.step_events import make_step_events
from headstock.scheduler import Failed, Plan, Pooled, Sampled
from headstock.spi import Sample
from headstock_conformance.scheduler.toy_device import VOCAB

TOKENS = st.integers(0, 2)
"""So few that drafts are often right."""


@define
class Row:
    """A row of a plan, and what came of it.

    kind: "samples", "goes on" in its prompt, "pools" or "ends" pooled
    samples, healthy: of each logit, the last one behind all drafts
    finite: whether what it pooled is
    """

    kind: str
    drafts: list[int]
    samples: list[int]
    healthy: list[bool]
    finite: bool

    @property
    def is_sound(self) -> bool:
        """Whether nothing that was computed of the row is NaN."""
        return self.finite if self.kind in ("pools", "ends") else all(self.healthy)

    @property
    def accepted(self) -> list[int]:
        """What the row says: right drafts, and the sample behind the last of them."""
        said = [self.samples[0]]
        for draft, sample in zip(self.drafts, self.samples[1:], strict=True):
            if draft != said[-1]:
                break
            said.append(sample)
        return said


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Rows of every kind; some of them are NaN at some logit."""
    kind = draw(st.sampled_from(["samples", "samples", "samples", "goes on", "pools", "ends"]))
    drafts = draw(st.lists(TOKENS, max_size=3)) if kind == "samples" else []
    count = 0 if kind in ("pools", "ends") else len(drafts) + 1
    is_healthy = st.integers(0, 5).map(bool)
    return Row(
        kind,
        drafts,
        draw(st.lists(TOKENS, min_size=count, max_size=count)),
        draw(st.lists(is_healthy, min_size=count, max_size=count)),
        draw(st.booleans()),
    )


def ints(values: Any) -> Any:
    """An array."""
    return np.array(list(values), np.int32)


def make_plan(rows: list[Row]) -> Plan:
    """The plan of the rows, at position 5 each."""
    counts = ints(len(row.drafts) for row in rows)
    pooling = ints({"pools": 1, "ends": 2}.get(row.kind, 0) for row in rows)
    return Plan(
        number=0,
        num_decode=0,
        rows=ints(range(len(rows))),
        admission_ids=ints(range(100, 100 + len(rows))),
        starts=ints(5 for _ in rows),
        stops=6 + counts,
        num_logits=ints(len(row.samples) for row in rows),
        samples=ints(row.kind == "samples" for row in rows),
        num_drafts=counts if counts.any() else ints([]),
        drafts=ints(token for row in rows for token in row.drafts),
        pooling=pooling if pooling.any() else ints([]),
    )


def make_sample(rows: list[Row]) -> Sample:
    """What the device found."""
    pooled = [[0.0 if row.finite else np.nan] for row in rows if row.kind in ("pools", "ends")]
    return Sample(
        tokens=torch.tensor([token for row in rows for token in row.samples], dtype=torch.int64),
        healthy=torch.tensor([each for row in rows for each in row.healthy], dtype=torch.bool),
        pooled=torch.tensor(pooled) if pooled else None,
    )


@given(st.lists(rows(), min_size=1, max_size=6), st.booleans())
def test_each_row_of_a_step_gets_what_it_would_get_alone(
    rows: list[Row], has_proposer: bool
) -> None:
    limits: Any = SimpleNamespace(max_drafts=3)
    proposer = toy_proposer.ToyProposer(toy_proposer.ToyOptions())
    drafting = Drafting(proposer, "guess", limits, VOCAB, 16, OutputTracker())
    if not has_proposer:
        for row in rows:
            row.drafts, row.samples, row.healthy = [], row.samples[:1], row.healthy[:1]
    plan = make_plan(rows)
    events = make_step_events(plan, make_sample(rows), drafting if has_proposer else None)
    said: dict[int, list[int]] = {}
    failed: list[int] = []
    ended: list[int] = []
    for event in events:
        if isinstance(event, Sampled):
            counts = np.ones_like(event.rows) if event.counts is None else event.counts
            parts = np.split(event.tokens, np.cumsum(counts)[:-1])
            said = {int(row): part.tolist() for row, part in zip(event.rows, parts, strict=True)}
        elif isinstance(event, Failed):
            failed = event.rows.tolist()
        elif isinstance(event, Pooled):
            ended = event.rows.tolist()

    assert said == {
        i: row.accepted for i, row in enumerate(rows) if row.kind == "samples" and row.is_sound
    }
    assert failed == [i for i, row in enumerate(rows) if not row.is_sound]
    assert ended == [i for i, row in enumerate(rows) if row.kind == "ends" and row.is_sound]
