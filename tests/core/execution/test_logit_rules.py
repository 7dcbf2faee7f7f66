"""What requests ban and favour: the tables of a step, and when there are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headstock import SamplingParams
from headstock.execution.buffers import Buffers
from headstock.execution.sampling_inputs import SamplingTable
from headstock.scheduler import Request

VOCAB, PROMPT = 20, 4
BUFFERS = Buffers(
    device=torch.device("cpu"),
    page_size=4,
    groups=(),
    pools=(),
    page_tables=(),
    tokens=torch.zeros((5, 32), dtype=torch.int64),
)


def table(
    *settings: dict[str, Any], min_tokens: int = 0, stop_ids: tuple[int, ...] = ()
) -> SamplingTable:
    """RowTables in which such requests sit, all with these stop ids, and only the first with a
    minimum.
    """
    sampling = SamplingTable(5, VOCAB)
    for row, params in enumerate(settings):
        request = Request(
            id=str(row),
            prompt=np.arange(PROMPT, dtype=np.int32),
            max_tokens=20,
            min_tokens=0 if row else min_tokens,
            stop_ids=stop_ids,
            params=SamplingParams(temperature=0.0, **params),
        )
        sampling.write_row(row, request)
    return sampling


def at(*positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in order, one position each."""
    return np.arange(len(positions)), np.array(positions)


def test_bans_and_biases_are_where_their_rows_are() -> None:
    sampling = table(
        {"logit_bias": {3: 1.5, 7: -2.0}},
        {},
        {"allowed_token_ids": (2, 9)},
        min_tokens=2,
        stop_ids=(9, 11, VOCAB),
    )
    got = sampling.make_sampling(*at(PROMPT, PROMPT, PROMPT), BUFFERS)
    bias, banned = torch.zeros(3, VOCAB), torch.zeros(3, VOCAB, dtype=torch.bool)
    bias[0, 3], bias[0, 7] = 1.5, -2.0
    banned[0, [9, 11]] = True
    banned[2] = True
    banned[2, [2, 9]] = False

    assert got.bias is not None and torch.equal(got.bias, bias)
    assert got.banned is not None and torch.equal(got.banned, banned)


def test_a_stop_id_that_is_allowed_is_banned_until_the_minimum_is_out() -> None:
    sampling = table({"allowed_token_ids": (2, 9)}, min_tokens=2, stop_ids=(9,))
    early, late = (
        sampling.make_sampling(*at(PROMPT - 1 + count), BUFFERS).banned for count in (1, 2)
    )

    assert early is not None and (~early[0]).nonzero().flatten().tolist() == [2]
    assert late is not None and (~late[0]).nonzero().flatten().tolist() == [2, 9]


@pytest.mark.parametrize(
    ("position", "ruled"), [(PROMPT - 2, False), (PROMPT - 1, True), (4, True), (5, False)]
)
def test_a_minimum_that_is_out_and_a_prompt_need_no_table(position: int, ruled: bool) -> None:
    sampling = table({}, min_tokens=2, stop_ids=(9,))
    got = sampling.make_sampling(*at(position), BUFFERS)

    assert (got.banned is not None, got.bias) == (ruled, None)
    assert (sampling.select_kind(*at(position), BUFFERS) is None) is ruled


def test_a_minimum_without_stop_ids_and_a_seat_that_is_taken_anew_have_no_rules() -> None:
    sampling = table({"logit_bias": {1: 1.0}}, {})
    sampling.write_row(
        0,
        Request(
            id="x", prompt=np.arange(PROMPT), max_tokens=9, min_tokens=9, params=SamplingParams()
        ),
    )

    assert (
        not sampling.logit_rules
        and sampling.make_sampling(*at(PROMPT, PROMPT), BUFFERS).banned is None
    )
