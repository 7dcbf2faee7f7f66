"""The cases of a proposer: its drafts, and read-only inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from attrs import evolve

from headstock import registry
from headstock.engine.drafting import find_proposal_fault
from headstock.scheduler.limits import MAX_DRAFTS
from headstock.selection.refusals import check_resolve
from headstock.spi import (
    DeviceEnv,
    DraftModel,
    PartQuery,
    Proposer,
    ProposerContext,
    ProposerSpec,
)
from headstock.spi.arrays import Ints
from headstock_conformance.case import Case
from headstock_conformance.ops.models import make_plain

VOCAB = 1000
"""Vocabulary size of the model, also in the query of `resolve`."""
LONG = 5_000
"""Tokens of a long row."""


def list_cases(spec: ProposerSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases of a proposer; independent of the machine."""
    named: dict[str, Callable[[Proposer], object]] = {
        "max_drafts is a number from 1 to 15 and stays": check_max_drafts,
        "rows that repeat themselves": check_repeating,
        "rows without a pattern": check_random,
        "rows of one token": check_short,
        "a long row": check_long,
        "many rows of any length and room": check_many,
        "a row that grows token by token": check_growing,
        "an answer stays when the next is made": check_kept,
    }
    if spec.by_model:  # nothing but the number of drafts is the plugin's own
        named = {"max_drafts is a number from 1 to 15 and stays": check_count}
    return tuple(Case(name, partial(run_with, spec, env, opt, run)) for name, run in named.items())


def run_with(
    spec: ProposerSpec, env: DeviceEnv, opt: Sequence[str], run: Callable[[Proposer], object]
) -> None:
    """Call the plugin's `resolve` for the vocabulary, make its proposer like the engine, and run a
    case.

    raises: CannotRun when it refuses a model of that vocabulary; PluginBroken, ValueError
    """
    check_resolve(spec, "--proposer", make_query(), env)
    options = () if spec.options is None else (registry.make_options(spec, opt),)
    proposer = registry.make_part(spec, Proposer, *options)
    proposer.start(make_context(spec))
    run(proposer)
    proposer.end(np.arange(4))
    proposer.close()


class RepeatingModel(DraftModel):
    """A second model, which says the last token of a row again."""

    vocab = VOCAB

    def continue_rows(self, tokens: Sequence[Ints], counts: Ints) -> list[Ints]:
        """As many of it as are asked for."""
        return [row[-1].repeat(count) for row, count in zip(tokens, counts.tolist(), strict=True)]

    def close(self) -> None:
        """Nothing is held."""


def make_context(spec: ProposerSpec) -> ProposerContext:
    """What the engine of that query tells a proposer."""
    query = make_query()
    return ProposerContext(
        vocab=VOCAB,
        max_rows=query.max_rows,
        max_len=query.max_seq_len,
        device="cpu",
        draft_model="a-second-model" if spec.takes_model else "",
        open_model=lambda name, settings: RepeatingModel(),
    )


def make_query() -> PartQuery:
    """The query of an engine whose model has the vocabulary that drafts are checked against."""
    return PartQuery(
        model=evolve(make_plain(), vocab=VOCAB, max_position=2 * LONG),
        dtype="float32",
        kv_dtype="float32",
        formats=(),
        contiguous=False,
        max_rows=64,
        max_batch_tokens=LONG,
        max_seq_len=2 * LONG,
    )


def propose(
    proposer: Proposer, rows: list[np.ndarray], room: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Call `propose` like the engine, with read-only inputs.

    raises: AssertionError when the result breaks a rule
    """
    tokens, rooms = [row.astype(np.int32) for row in rows], np.array(room, np.int32)
    copies = [row.copy() for row in (*tokens, rooms)]
    for array in (*tokens, rooms):
        array.setflags(write=False)
    ids = np.arange(len(tokens))
    ids.setflags(write=False)
    answer = proposer.propose(tokens, rooms, ids)
    fault = find_proposal_fault(answer, rooms, VOCAB)
    assert not fault, f"propose returns {fault}"
    for array, copy in zip((*tokens, rooms), copies, strict=True):
        assert np.array_equal(array, copy), "propose writes to the tokens or the room that it reads"
    counts, drafts = answer
    assert counts.dtype == drafts.dtype == np.int32, (
        f"propose: expected int32, got {counts.dtype} counts and {drafts.dtype} drafts"
    )
    assert int(counts.max(initial=0)) <= proposer.max_drafts, "a row gets more than max_drafts"
    return counts, drafts


def check_count(proposer: Proposer) -> int:
    """Memory and graphs are planned for it.   returns: it"""
    count: object = proposer.max_drafts
    assert isinstance(count, int) and 1 <= count <= MAX_DRAFTS, (
        f"max_drafts: expected 1 to {MAX_DRAFTS}, got {count!r}"
    )
    assert proposer.max_drafts == count, "max_drafts changes"
    return count


def check_max_drafts(proposer: Proposer) -> None:
    """The same before and behind a call."""
    count = check_count(proposer)
    propose(proposer, [np.arange(20) % 4], [count])
    assert proposer.max_drafts == count, "max_drafts changes"


def check_repeating(proposer: Proposer) -> None:
    """The likeliest rows to get drafts."""
    for period in (1, 2, 3, 7):
        row = np.tile(np.arange(period) + 5, 40 // period + 1)
        for room in range(1, proposer.max_drafts + 1):
            propose(proposer, [row], [room])


def check_random(proposer: Proposer) -> None:
    """Rows without a pattern."""
    rng = np.random.default_rng(0)
    propose(proposer, [rng.integers(0, VOCAB, 60) for _ in range(8)], [proposer.max_drafts] * 8)


def check_short(proposer: Proposer) -> None:
    """The shortest prompt there is."""
    propose(
        proposer, [np.array([token]) for token in (0, 1, VOCAB - 1)], [1, 1, proposer.max_drafts]
    )


def check_long(proposer: Proposer) -> None:
    """A long conversation."""
    rng = np.random.default_rng(1)
    propose(proposer, [rng.integers(0, 4, LONG)], [proposer.max_drafts])


def check_many(proposer: Proposer) -> None:
    """Rows have different room."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        count = int(rng.integers(1, 30))
        rows = [rng.integers(0, 3, int(rng.integers(1, 50))) for _ in range(count)]
        room = rng.integers(1, proposer.max_drafts + 1, count)
        propose(proposer, rows, room.tolist())


def check_growing(proposer: Proposer) -> None:
    """`propose` is called after each token of a row, as in decode."""
    row = np.tile(np.array([3, 1, 4, 1, 5]), 8)
    for length in range(1, len(row)):
        propose(proposer, [row[:length]], [min(proposer.max_drafts, len(row) - length)])


def check_kept(proposer: Proposer) -> None:
    """The engine still reads a result when it calls again."""
    first = propose(proposer, [np.tile([1, 2, 3], 9)], [proposer.max_drafts])
    copies = [array.copy() for array in first]
    propose(proposer, [np.tile([7, 8], 9), np.tile([9], 9)], [1, proposer.max_drafts])
    for array, copy in zip(first, copies, strict=True):
        assert np.array_equal(array, copy), "the next result overwrites the last one"
