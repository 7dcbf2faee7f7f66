"""Vectors of prompts beside the hidden states of transformers, which are after the last norm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_parity import PROMPTS, SMALL
from often import often
from transformers import AutoModel

from headstock import LLM, SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.scheduler import PoolingKind, Request
from headstock_conformance.model.parity import shape, write

TOLERANCE = 1e-4
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
}
ENGINES: dict[str, dict[str, Any]] = {
    "batches": {},
    "chunks": {"max_batch_tokens": 4, "max_running_requests": 4},
    "no overlap": {
        "max_batch_tokens": 4,
        "max_running_requests": 4,
        "overlap": False,
    },
    "preemption": {"num_pages": 24, "max_running_requests": 2, "max_batch_tokens": 9},
}
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint of each family."""
    directory = tmp_path_factory.mktemp(request.param)
    write(directory, shape(request.param, **FAMILIES[request.param]))
    return directory


@pytest.fixture(scope="module")
def hidden(checkpoint: Path) -> list[np.ndarray]:
    """What transformers makes of each prompt alone, [tokens, hidden] each."""
    model = AutoModel.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]


POOL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
}


def mix(engine: Engine) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """Each prompt pooled both ways and continued: the vectors, and the tokens.

    Those that generate come when some are pooled already, and go first.
    """
    vectors: dict[str, np.ndarray] = {}
    tokens: dict[str, list[int]] = {}

    def submit(*kinds: PoolingKind) -> None:
        for number, ids in reversed(list(enumerate(PROMPTS))):
            for kind in kinds:
                one = Request(
                    id=f"{kind}{number}",
                    prompt=np.array(ids, np.int32),
                    max_tokens=0 if kind else MAX_TOKENS,
                    params=SamplingParams(temperature=0.0),
                    pooling=kind,
                    priority=0 if kind else 1,
                )
                engine.submit(one)

    def step() -> None:
        for update in engine.step():
            assert update.error is None, update.error
            if update.embedding is not None:
                vectors[update.id] = np.array(update.embedding)
            tokens[update.id] = [*tokens.get(update.id, []), *update.tokens]

    submit("last", "mean")
    for _ in range(5):
        step()
    submit("")
    while engine.has_work:
        step()
    return vectors, tokens


@pytest.fixture(scope="module")
def tokens(checkpoint: Path) -> dict[str, list[int]]:
    """What each prompt alone is continued with."""
    engine = Engine(EngineConfig(model=str(checkpoint), **SMALL, max_running_requests=1))
    _, alone = mix(engine)
    engine.close()
    return alone


@pytest.mark.feature("R5")
@pytest.mark.parametrize("name", often(2, ["chunks", "preemption", "batches", "no overlap"]))
def test_vectors_are_those_of_transformers_beside_rows_that_generate(
    checkpoint: Path, hidden: list[np.ndarray], tokens: dict[str, list[int]], name: str
) -> None:
    settings = SMALL | ENGINES[name]
    engine = Engine(EngineConfig(model=str(checkpoint), debug_invariants=True, **settings))
    vectors, said = mix(engine)
    preemptions = engine.stats().preemptions
    engine.close()

    assert preemptions > 0 or name != "preemption"
    assert said == tokens
    for number, states in enumerate(hidden):
        for kind, pool in POOL.items():
            found = vectors[f"{kind}{number}"]
            np.testing.assert_allclose(found, pool(states), atol=TOLERANCE, rtol=0)


@pytest.mark.feature("R5")
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embed_gives_vllms_names_and_length_1_unless_told(
    checkpoint: Path, hidden: list[np.ndarray], pooling: str
) -> None:
    with LLM(str(checkpoint), **SMALL) as llm:
        outputs = llm.embed(PROMPTS, pooling)
        plain = llm.embed(PROMPTS, pooling, normalize=False)
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    for output, unscaled, states in zip(outputs, plain, hidden, strict=True):
        wanted = POOL[pooling](states)
        np.testing.assert_allclose(unscaled.outputs.embedding, wanted, atol=TOLERANCE, rtol=0)
        wanted = wanted / np.linalg.norm(wanted)
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=TOLERANCE, rtol=0)
        assert output.finished and output.outputs.error is None
