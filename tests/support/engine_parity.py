"""Small checkpoints through the whole engine beside transformers, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from transformers import AutoModelForCausalLM

from headstock import LLM, SamplingParams
from headstock_conformance.model.parity import tokens
from headstock_cuda_graph.runner import CudaGraphRunner

MAX_TOKENS = 10
TIE = 1e-4
"""A margin between the two best tokens under which float32 may fall on either side."""
PROMPTS = [tokens(length, seed=length) for length in (1, 2, 3, 5, 8, 13, 21, 30)]
SMALL = {
    "attn": "sdpa",
    "page_size": 4,
    "num_pages": 128,
    "max_seq_len": 48,
    "debug_canary": True,
    "overlap": True,  # as on a GPU
}


@frozen
class Answer:
    """Greedy tokens, the log-probability of each, and how far it is ahead of the second best."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def answer_alone(
    checkpoint: Path,
    kind: Any = AutoModelForCausalLM,
    prompts: Sequence[list[int]] = tuple(PROMPTS),
) -> list[Answer]:
    """What transformers makes of each prompt alone, every token from the whole sequence anew."""
    model = kind.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = []
    for prompt in prompts:
        answer, ids = Answer([], [], []), list(prompt)
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            (best, second), (token, _) = scores.log_softmax(-1).topk(2)
            answer.tokens.append(int(token))
            answer.logprobs.append(float(best))
            answer.margins.append(float(best - second))
            ids.append(int(token))
        answers.append(answer)
    return answers


def generate(
    checkpoint: Path, *, prompts: Sequence[list[int]] = tuple(PROMPTS), **settings: Any
) -> tuple[list[Any], Any]:
    """The greedy outputs of all prompts at once, and the engine that made them (closed)."""
    with LLM(str(checkpoint), debug_invariants=True, **(SMALL | settings)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [output.outputs[0] for output in outputs], llm._session.engine


def assert_equal(output: Any, answer: Answer, number: int) -> None:
    """The tokens and log-probabilities, up to a margin under TIE."""
    for at, token in enumerate(output.token_ids):
        if token != answer.tokens[at]:
            assert answer.margins[at] < TIE, f"prompt {number}, token {at}"
            return
        found = output.logprobs[at][token].logprob
        assert abs(found - answer.logprobs[at]) < TIE, f"prompt {number}, token {at}"


def counted(name: str, counts: Counter[str]) -> Any:
    """The runner's method of that name, which counts the steps that it replays."""
    replay = getattr(CudaGraphRunner, name)

    def count(runner: CudaGraphRunner, step: Any) -> Any:
        sample = replay(runner, step)
        counts[name] += sample is not None
        return sample

    return count
