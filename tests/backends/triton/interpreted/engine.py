"""An engine over interpreted kernels makes the tokens that it makes over `sdpa`."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from headstock import LLM, SamplingParams
from headstock.spi import DeviceRange
from headstock_triton_attn import plugin

QUESTIONS = ["12 + 30 =", "Once upon a time", "12 + 30 = 42. 7 + 5 ="]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def generate(attn: str) -> list[tuple[int, ...]]:
    """The tokens of answers to `QUESTIONS`, whose prompts are cut into chunks."""
    settings: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_batch_tokens": 7}
    with LLM("demo", attn=attn, ops="torch", device="cpu", **settings) as llm:
        assert f"attention {attn}" in "\n".join(llm._session.engine.summary.lines())
        return [tuple(each.outputs[0].token_ids) for each in llm.generate(QUESTIONS, PARAMS)]


@pytest.mark.full
def test_answers_are_those_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    own = evolve(
        plugin.spec(),
        capabilities=evolve(plugin.CAPABILITIES, devices=(DeviceRange("cpu"),)),
        resolve=None,
    )
    monkeypatch.setattr(plugin, "spec", lambda: own)
    assert generate("triton") == generate("sdpa")
