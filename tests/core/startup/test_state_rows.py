"""How many requests run at once where each keeps a state."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.test_qwen3_5_engine import HF

from headstock import LLM, SamplingParams
from headstock.llm import get_session
from headstock.startup import build
from headstock.startup.state_rows import count_rows
from headstock_conformance.model.parity import write

MIB = 2**20


@given(
    asked=st.integers(1, 512),
    state=st.integers(1, 10**9),
    room=st.integers(0, 10**11),
)
def test_states_leave_a_third_of_the_memory_to_tokens(asked: int, state: int, room: int) -> None:
    rows = count_rows(asked, state, room)

    assert 1 <= rows <= asked
    assert rows == 1 or 3 * rows * state <= 2 * room
    assert rows == asked or 3 * (rows + 1) * state > 2 * room


@pytest.mark.feature("V4")
def test_a_model_starts_with_as_many_requests_as_memory_has_states_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, HF | {"linear_key_head_dim": 64, "linear_value_head_dim": 64})
    prompts = [{"prompt_token_ids": [3 + row, 5, 7]} for row in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    settings = {"model": str(tmp_path), "max_batch_tokens": 64, "max_running_requests": 64}

    def answer() -> tuple[list[object], int, str]:
        with LLM(**settings, max_seq_len=128) as llm:
            summary = get_session(llm).engine.summary
            answers = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
            return answers, summary.max_running_requests, "\n".join(summary.notes)

    wanted, rows, notes = answer()
    assert rows == 64 and "max_running_requests" not in notes
    # So that a part of the states would not fit beside what else a start plans.
    monkeypatch.setattr(build, "reclaim_free_bytes", lambda device: 8 * MIB)
    found, rows, notes = answer()

    assert 1 <= rows < 64
    assert f"max_running_requests (--max-running-requests) is cut from 64 to {rows}" in notes
    assert found == wanted
