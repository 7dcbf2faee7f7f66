"""What a seat's settings do to its tokens: penalties from the first repetition on, noise of its own
at each place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstock import SamplingParams
from headstock.execution.buffers import Buffers
from headstock.execution.sampling_inputs import SamplingTable
from headstock.nn.sampler import sample
from headstock.scheduler import Request

VOCAB, PROMPT, OUTPUT = 50, [3, 4, 5], 8


def answer(start: int = 0, stop: int = OUTPUT, **params: Any) -> list[int]:
    """Output tokens `start` to `stop` of one request to a model that finds every token equally
    likely.
    """
    tokens = torch.zeros((1, 32), dtype=torch.int64)
    tokens[0, : len(PROMPT)] = torch.tensor(PROMPT)
    buffers = Buffers(
        device=torch.device("cpu"), page_size=4, groups=(), pools=(), page_tables=(), tokens=tokens
    )
    table, prompt = SamplingTable(1, VOCAB), np.array(PROMPT, np.int32)
    table.write_row(
        0, Request(id="a", prompt=prompt, max_tokens=OUTPUT, params=SamplingParams(**params))
    )
    sampled = []
    for length in range(len(PROMPT) + start, len(PROMPT) + stop):
        chosen = table.make_sampling(np.zeros(1, np.int64), np.array([length - 1]), buffers)
        token = int(sample(torch.zeros(1, VOCAB), chosen).tokens)
        buffers.store_tokens(
            np.zeros(1, np.int32), np.array([length], np.int32), torch.tensor([token])
        )
        sampled.append(token)
    return sampled


@pytest.mark.parametrize(
    ("penalty", "first"),
    [("presence_penalty", 3), ("frequency_penalty", 3), ("repetition_penalty", 6)],
)
def test_penalties_count_the_latest_token_and_only_repetition_the_prompt(
    penalty: str, first: int
) -> None:
    biases = {3: 100.0, 4: 99.9, 5: 99.8, 6: 99.7, 7: 99.6, 8: 99.5, 9: 99.4}

    assert answer(temperature=0.0, stop=4, logit_bias=biases, **{penalty: 1.5}) == list(
        range(first, first + 4)
    )


def test_noise_is_another_at_each_place_and_for_each_seed_and_the_same_again() -> None:
    whole = answer(temperature=1.0, seed=7)

    assert len(set(whole)) > OUTPUT / 2
    assert answer(4, temperature=1.0, seed=7) == whole[4:]  # whatever was sampled before
    assert answer(temperature=1.0, seed=8) != whole


@given(st.data())
def test_the_device_has_the_settings_of_the_latest_requests(data: st.DataObject) -> None:
    rows = 4
    table = SamplingTable(rows, VOCAB)
    buffers = Buffers(
        device=torch.device("cpu"),
        page_size=4,
        groups=(),
        pools=(),
        page_tables=(),
        tokens=torch.zeros((rows, 32), dtype=torch.int64),
    )
    settings = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_p=st.sampled_from([0.25, 1.0]),
        min_p=st.sampled_from([0.0, 0.5]),
        top_k=st.sampled_from([0, 1, 7]),
        seed=st.sampled_from([0, 1, 2**62 + 1]),
    )
    wanted = [[0.0, 1.0, 0.0, VOCAB, 0] for _ in range(rows)]
    for _ in range(data.draw(st.integers(1, 4))):
        for row in data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3)):
            params = data.draw(settings)
            prompt = np.array(PROMPT, np.int32)
            table.write_row(row, Request(id="a", prompt=prompt, max_tokens=9, params=params))
            top_k = params.top_k or VOCAB
            wanted[row] = [params.temperature, params.top_p, params.min_p, top_k, params.seed]
        table.select_kind(np.arange(rows), np.full(rows, 3), buffers)

        columns = (*table.columns.floats.tolist(), *table.columns.integers.tolist())
        assert [list(each) for each in zip(*columns, strict=True)] == wanted
