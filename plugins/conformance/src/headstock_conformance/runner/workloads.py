"""Steps that a runner must get right: each workload drives one side of what a step may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen
from torch import Tensor

from headstock.execution.token_masks import MaskSource, PlannedMasks
from headstock.sampling_params import SamplingParams
from headstock.scheduler import Plan, Request
from headstock.spi import LogitColumn, LogitsProcessor
from headstock.spi.arrays import Ints
from headstock_conformance.runner.drive import Drive
from headstock_conformance.runner.rig import MAX_ROWS
from headstock_conformance.runner.rows import Work, join_runs

VOCAB = 160
"""Tokens of the models of `ops.models`."""
GREEDY = SamplingParams(temperature=0.0)


def request(seed: int, length: int, params: SamplingParams = GREEDY, **changes: Any) -> Request:
    """A request with a random prompt."""
    prompt = np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)
    return Request(id=str(seed), prompt=prompt, max_tokens=40, params=params, **changes)


def fill_rows(drive: Drive, count: int, params: SamplingParams = GREEDY) -> None:
    """Compute the prompts of `count` rows, in two steps."""
    for row in range(count):
        drive.admit(row, request(row, 2 + 5 * row % 11, params))
    drive.step(*range(count // 2))
    drive.step(*range(count // 2, count))


def decode_in_any_order(drive: Drive) -> None:
    """Decode rows in any number and order."""
    fill_rows(drive, 11)
    rng = np.random.default_rng(1)
    for count in (1, 11, 3, 2, 5, 9, 1, 4, 6, 7):
        rows = rng.permutation(11)[:count].tolist()
        for _ in range(2 if count < 6 else 1):
            drive.step(*rows)


def decode_many(drive: Drive) -> None:
    """As many rows as there are, for a dozen steps in a row."""
    fill_rows(drive, MAX_ROWS)
    for _ in range(12):
        drive.step(*reversed(range(MAX_ROWS)))


def hundreds_of_rows(drive: Drive) -> None:
    """More rows than most steps have."""
    count = 270
    for row in range(count):
        drive.admit(row, request(row, 1 + row % 5))
    drive.step(*range(count))
    drive.step(*reversed(range(count)))
    drive.step(*range(3, 250))


def failed_step(drive: Drive) -> None:
    """A step that raises costs the requests in it, and no other step."""
    fill_rows(drive, 5)
    drive.step(0, 1, 2)
    drive.fail_step(1, 0)
    drive.step(2, 3)
    drive.admit(0, request(20, 9))
    drive.step(3, 0)
    drive.admit(5, request(21, 12))
    drive.step(Work(row=5, count=4), 0)
    drive.fail_step(5, 2)
    drive.admit(2, request(22, 4))
    drive.step(2, 0)
    for rows in ((0,), (3, 2, 0, 4), (2, 3)):
        drive.step(*rows)


def whole_prompts(drive: Drive) -> None:
    """Prompts of any length, alone and beside each other."""
    for row, length in enumerate((1, 2, 3, 4, 5, 17, 30, 40)):
        drive.admit(row, request(row, length))
        drive.step(row)
    for row, length in enumerate((30, 1, 4, 9)):
        drive.admit(row, request(20 + row, length))
    drive.step(2, 0, 3, 1)
    drive.step(*range(8))


def chunks(drive: Drive) -> None:
    """Prompts in chunks, some of one token, in steps that sample no token at all."""
    drive.admit(0, request(0, 30))
    drive.admit(1, request(1, 23))
    for counts in ((7, 5), (1, 1), (9, 1), (12, 3)):
        drive.step(*(Work(row=row, count=count) for row, count in enumerate(counts)))
    drive.step(0, Work(row=1, count=1))
    drive.step(Work(row=1, count=4), 0)
    drive.step(1, 0)
    drive.step(0, 1)


def beside_prompts(drive: Drive) -> None:
    """Decode rows beside prompts, whole and in chunks."""
    fill_rows(drive, 5)
    drive.admit(5, request(15, 26))
    drive.step(3, Work(row=5, count=6), 0)
    drive.admit(6, request(16, 3))
    drive.step(6, 1, Work(row=5, count=13), 2, 4)
    drive.step(0, 5, 6)
    drive.admit(7, request(17, 1))
    drive.step(7, *range(7))
    drive.step(*range(8))


def come_and_go(drive: Drive) -> None:
    """Rows that sit out steps, end, and are given to other requests."""
    fill_rows(drive, 4)
    drive.step(0, 1, 2, 3)
    for turn in range(6):
        row = turn % 3
        drive.admit(row, request(30 + turn, 3 + 4 * turn))
        drive.step(row, *(each for each in (0, 1, 2) if each != row))
        drive.step(row, (row + 1) % 3)
        # Longer than all others, and in few of the steps.
        drive.step(3, row)
    drive.step(3, 2, 1, 0)


def settings(drive: Drive) -> None:
    """Rows with and without a temperature, top-k, top-p and min-p, and other ones in these rows."""
    kinds = [
        GREEDY,
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(temperature=1.3, top_k=5, seed=2),
        SamplingParams(temperature=1.1, top_p=0.7, seed=3),
        SamplingParams(temperature=1.7, min_p=0.1, seed=4),
    ]
    for turn in range(3):
        for row in range(5):
            drive.admit(row, request(row + 5 * turn, 4 + row, kinds[(row + turn) % 5]))
        drive.step(*range(5))
        for rows in ((0,), (1, 0), (3, 2, 4), (4, 3, 2, 1, 0), (2, 1)):
            drive.step(*rows)


def rules(drive: Drive) -> None:
    """Penalties, biases and tokens that are ruled out, beside rows without."""
    kinds = [
        SamplingParams(temperature=0.0, repetition_penalty=0.2),
        GREEDY,
        SamplingParams(temperature=0.0, presence_penalty=2.0, allowed_token_ids=[3, 40, 77]),
        SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(0, VOCAB, 9), 9.0)),
        SamplingParams(
            temperature=1.0, frequency_penalty=2.0, allowed_token_ids=[4, 41, 78], seed=5
        ),
    ]
    for row, params in enumerate(kinds):
        drive.admit(row, request(row, 5 + row, params))
    drive.step(0, 1, 2, 3, 4)
    for rows in ((1,), (3, 1, 0), (2, 1, 0, 3), (4, 2), (1,), (0, 2, 4), (3, 4, 2, 1, 0), (2, 4)):
        drive.step(*rows)
    drive.admit(4, request(9, 12))
    drive.step(2, 0, 4)


def log_probabilities(drive: Drive) -> None:
    """Log-probabilities of samples, and of prompts that are scored in parts."""
    some = SamplingParams(temperature=0.0, logprobs=3)
    warm = SamplingParams(temperature=0.9, logprobs=0, seed=6)
    scored = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=2)
    for row, params in enumerate((some, GREEDY, warm)):
        drive.admit(row, request(row, 5 + row, params))
    drive.admit(3, request(3, 37, scored, prompt_logprobs=True))
    drive.step(0, 1, 2)
    drive.step(2, Work(row=3, count=31), 0)
    drive.step(3, 1)
    for rows in ((1,), (0,), (3, 2, 1, 0), (1, 2)):
        drive.step(*rows)


def drafts(drive: Drive) -> None:
    """Drafts that are right, wrong, or right at first, of rows with any number of them."""
    rng = np.random.default_rng(2)
    fill_rows(drive, 6)
    for counts in ((3, 3), (3, 1, 2), (1,), (2, 3, 3, 1, 3, 2), (3,), (1, 2, 3)):
        rows = rng.permutation(6)[: len(counts)].tolist()
        works = [
            Work(row=row, drafts=guess(drive, row, count, right=(row + count) % 4))
            for row, count in zip(rows, counts, strict=True)
        ]
        drive.step(*works)
        drive.step(*rows)


def drafts_beside_others(drive: Drive) -> None:
    """Drafts beside rows without, and beside prompts; with temperatures and log-probabilities."""
    warm = SamplingParams(temperature=0.9, seed=7)
    some = SamplingParams(temperature=0.0, logprobs=2)
    for row, params in enumerate((GREEDY, warm, some, warm)):
        drive.admit(row, request(row, 4 + row, params))
    drive.step(0, 1, 2, 3)
    drive.admit(4, request(14, 20))
    drive.step(Work(row=0, drafts=guess(drive, 0, 2, right=1)), 3, 1)
    drive.step(Work(row=1, drafts=guess(drive, 1, 3, right=3)), Work(row=4, count=8), 0)
    drive.step(2, Work(row=3, drafts=guess(drive, 3, 1, right=0)), 4)
    drive.step(Work(row=2, drafts=guess(drive, 2, 3, right=2)), 4, 0)
    drive.step(*range(5))


def own_drafts(drive: Drive) -> None:
    """Drafts that the model's own layers make, right ones and wrong ones, beside prompts too."""
    warm = SamplingParams(temperature=0.9, seed=12)
    for row in range(5):
        drive.admit(row, request(row, 2 + 3 * row, warm if row == 3 else GREEDY))
    drive.step(0, 1, 2)
    drive.step(own(drive, 1), 3, 4, own(drive, 0, count=2))
    for rows in ((2, 0), (4,), (1, 3, 0, 2), (3, 0, 1, 2), (0, 1, 2, 3, 4)):
        drive.step(*(own(drive, row, right=(row + len(rows)) % 4) for row in rows))
    drive.admit(5, request(25, 17))
    drive.step(own(drive, 3, right=1), Work(row=5, count=8), own(drive, 1, right=3))
    # Rows without drafts go on from their newest token.
    drive.step(0, 4)
    drive.step(5, own(drive, 4, right=2), 2)
    drive.step(own(drive, 5), own(drive, 2, count=1, right=1))


def own(drive: Drive, row: int, *, count: int = 3, right: int = 0) -> Work:
    """A row with drafts of its model, the first `right` of which are made right."""
    drive.plant(row, drive.foresee(row, right))
    return Work(row=row, drafts=(-1,) * count)


def guess(drive: Drive, row: int, count: int, *, right: int) -> tuple[int, ...]:
    """Drafts for a row, the first `right` of which it would sample."""
    seated = drive.rows[row]
    tokens = drive.foresee(row, count)[:right]
    wrong = (tokens[-1] if tokens else seated.tokens[-1]) + 1
    rest = [(wrong + 7 * number) % VOCAB for number in range(count - len(tokens))]
    return (*tokens, *rest)


def pooled(drive: Drive) -> None:
    """Prompts that are pooled, whole and in chunks, beside rows that generate."""
    fill_rows(drive, 3)
    for row, (length, kind) in enumerate(((9, "mean"), (12, "last"), (1, "last"), (21, "mean")), 3):
        drive.admit(row, request(row, length, GREEDY, pooling=kind))
    drive.step(3)
    drive.step(0, 4, Work(row=6, count=8))
    drive.step(5)
    drive.step(Work(row=6, count=1), 2, 1)
    drive.step(6, 0)
    drive.step(2, 0, 1)


def shared_pages(drive: Drive) -> None:
    """Rows that share their first pages, between others."""
    prompt = request(0, 24)
    drive.admit(0, prompt)
    drive.step(0)
    for row in range(1, 9):
        length = 3 * row if row in (2, 5) else 24
        if length < 24:
            drive.admit(row, request(row, length))
        else:
            drive.admit(row, request(0, 24), pages=3 + row % 3)
    drive.step(*range(1, 9))
    for rows in ((2, 0, 5, 1, 7, 3, 8, 4, 6), (0, 3), (8, 2, 7, 5, 6), tuple(range(9))):
        drive.step(*rows)
        drive.step(*rows)
    drive.admit(9, request(40, 15))
    drive.step(6, 9, 2, 4, 0)


def unsound_row(drive: Drive) -> None:
    """A row whose keys and values are NaN: only this row is not healthy."""
    fill_rows(drive, 4)
    drive.step(0, 1, 2, 3)
    for group, pages in enumerate(drive.rows[2].pages):
        drive.fill(group, [int(pages[0])], np.nan)
    sample = drive.step(3, 2, 0, 1)
    assert sample.healthy.tolist() == [True, False, True, True]
    drive.admit(2, request(20, 8))
    drive.step(0, 2, 1)
    drive.step(3, 2, 1, 0)


def everything(drive: Drive) -> None:
    """Chunks, decode rows and rows that change hands, for models of other layouts."""
    chunks(drive)
    come_and_go(drive)
    beside_prompts(drive)


def latent(drive: Drive) -> None:
    """The same, and drafts; a row that keeps a state has none."""
    everything(drive)
    drafts(drive)


def masked(drive: Drive) -> None:
    """Rows some of which may sample few tokens, which the host finds during the forward pass."""
    warm = SamplingParams(temperature=0.9, seed=8)
    for row in range(6):
        drive.admit(row, request(row, 4 + row, warm if row % 3 == 0 else GREEDY))
    drive.step(0, 1, 2)
    drive.step(3, 4, 5, 1)
    for rows in ((1,), (0,), (1, 3, 5), (0, 2, 4), (5, 4, 3, 2, 1, 0)):
        drive.step(*rows)
    drive.step(
        Work(row=1, drafts=guess(drive, 1, 2, right=1)),
        Work(row=2, drafts=guess(drive, 2, 3, right=2)),
    )
    drive.step(3, 2, 1)


class OddRowsMasked(MaskSource):
    """Lets odd rows sample few tokens, other ones at each position."""

    def plan_masks(self, plan: Plan) -> PlannedMasks | None:
        """The masks of the samples of odd rows."""
        rows = plan.rows.repeat(plan.num_logits)
        after = join_runs(plan.stops, plan.num_logits) + 1
        is_masked = (rows % 2 == 1) & plan.samples.repeat(plan.num_logits).astype(bool)
        logits = is_masked.nonzero()[0]
        return FewTokens(logits, after[logits]) if len(logits) else None


@frozen(eq=False)
class FewTokens(PlannedMasks):
    """Every fifth token is allowed, from the position on.

    positions: [m] int64, of the tokens that are sampled
    """

    masked_logits: Ints
    positions: Ints

    @property
    def logits(self) -> Ints:
        """Which of the plan's logits are masked."""
        return self.masked_logits

    def fill(self, masks: np.ndarray) -> None:
        """Fill the masks.   writes: masks"""
        for mask, position in zip(masks, self.positions.tolist(), strict=True):
            bits = np.zeros(len(mask) * 32, np.uint8)
            bits[position % 5 : VOCAB : 5] = 1
            mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


def processed(drive: Drive) -> None:
    """Rows that give a logits processor values, beside rows that do not."""
    warm = SamplingParams(temperature=0.9, seed=9)
    for row in range(6):
        values: Mapping[str, int] | None = {"banned": 7 * row} if row % 2 else None
        params = warm if row in (3, 4) else GREEDY
        drive.admit(row, request(row, 4 + row, params, processor_values=(values,)))
    drive.step(0, 1, 2, 3, 4, 5)
    for rows in ((0,), (1,), (1, 3, 5), (0, 2, 4), (5, 4, 3, 2, 1, 0), (2, 5)):
        drive.step(*rows)


class BanTokens(LogitsProcessor):
    """Rules out the tokens from `banned` on, modulo 3; -1 for none."""

    columns: Mapping[str, LogitColumn] = {"banned": LogitColumn(neutral=-1, dtype="int64")}
    changes_argmax = True

    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """Requests of the kit have their values already."""
        return None

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Lower every third token's logit, other ones at each position."""
        banned = columns["banned"][:, None]
        tokens = at.new_ones(logits.shape).cumsum(1)
        is_banned = (banned >= 0) & ((tokens + banned + at[:, None]) % 3 > 0)
        return logits.masked_fill(is_banned, -50.0)
