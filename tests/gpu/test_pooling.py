"""Pooled prompts on the device: beside graphs, in chunks, and without a wait for the device.

`HEADSTOCK_POOLING_DEVICE=cpu` tries the tests without a GPU.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from headstock import LLM, SamplingParams
from headstock.nn.pooling import pool_hidden
from headstock.spi import Batch, Pooling

DEVICE = os.environ.get("HEADSTOCK_POOLING_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)

PROMPTS = [[5 + (7 * at + 3 * row) % 500 for at in range(1 + 29 * row)] for row in range(12)]
NEAR = 0.999
"""The least cosine of two vectors that 16 bits have rounded in different ways."""


def embed(**settings: Any) -> dict[str, np.ndarray]:
    """The vectors of all prompts by way of pooling, [prompts, hidden] each."""
    with LLM("demo", num_pages=512, **settings) as llm:
        return {
            pooling: np.array([each.outputs.embedding for each in llm.embed(PROMPTS, pooling)])
            for pooling in ("last", "mean")
        }


def test_vectors_are_those_of_float32_on_a_cpu() -> None:
    wanted, found = embed(device="cpu"), embed(device=DEVICE)
    for pooling, vectors in wanted.items():
        cosines = (vectors * found[pooling]).sum(1)
        assert cosines.min() > NEAR, f"{pooling}: {cosines}"


def test_chunks_change_nothing_but_rounding() -> None:
    whole, cut = embed(device=DEVICE), embed(device=DEVICE, max_batch_tokens=40)
    for pooling, vectors in whole.items():
        assert (vectors * cut[pooling]).sum(1).min() > NEAR


def test_rows_that_generate_beside_them_say_what_they_say_alone() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    sums = ["23 + 48 =", "47 + 38 =", "12 + 30 ="]
    with LLM("demo", num_pages=512, device=DEVICE) as llm:
        alone = [each.outputs[0].text[:4] for each in llm.generate(sums, params)]
        beside: list[str] = []

        def generate() -> None:
            beside.extend(each.outputs[0].text[:4] for each in llm.generate(sums, params))

        thread = threading.Thread(target=generate)
        thread.start()
        while thread.is_alive():
            assert all(each.outputs.error is None for each in llm.embed(PROMPTS, "mean"))
        thread.join()
    assert beside == alone


# torch says of this mode that it does not see every wait.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_pooling_waits_for_nothing_on_the_device() -> None:
    lens = torch.tensor([1, 700, 3, 90])
    starts = torch.tensor([0, 0, 40, 0])
    total = int(lens.sum())
    hidden = torch.randn(total, 1024, device=DEVICE, dtype=torch.bfloat16)
    hidden[0] = torch.nan  # of a row beside them
    ends = torch.cat((torch.zeros(1), lens.cumsum(0))).int()
    nothing = torch.zeros(total, dtype=torch.int64, device=DEVICE)
    batch = Batch(
        tokens=nothing,
        positions=nothing,
        token_rows=nothing,
        row_ids=torch.tensor([3, 1, 0, 2], device=DEVICE),
        starts=starts.to(DEVICE),
        query_start=ends.to(DEVICE),
        max_query_len=700,
        slots=(),
        pools=(),
        logit_indices=None,
    )
    before = torch.full((5, 1024), 2.0, device=DEVICE)
    pooling = Pooling(
        rows=torch.tensor([1, 2, 3], device=DEVICE),
        is_mean=torch.tensor([True, True, False], device=DEVICE),
        sums=before.clone(),
    )
    pool_hidden(hidden, batch, pooling)  # what is set up at first use may wait
    pooling.sums.copy_(before)  # type: ignore[union-attr]
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = pool_hidden(hidden, batch, pooling)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    exact = hidden.double()
    wanted = [exact[1:701].mean(0), (exact[701:704].sum(0) + 2.0) / 43, exact[-1]]
    torch.testing.assert_close(found.double(), torch.stack(wanted), atol=1e-4, rtol=1e-4)
