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
    """What transformers makes of each prompt, every token from the whole sequence anew.

    All are rows of one batch: what pads a row stands behind its last token, which sees none of it.
    """
    model = kind.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = [Answer([], [], []) for _ in prompts]
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.zeros((len(prompts), int(ends.max()) + MAX_TOKENS), dtype=torch.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    each = torch.arange(len(prompts))
    for _ in range(MAX_TOKENS):
        with torch.inference_mode():
            seen = model(rows[:, : int(ends.max())], use_cache=False).logits
        scores, found = seen[each, ends - 1].log_softmax(-1).topk(2)
        rows[each, ends] = found[:, 0]
        ends += 1
        for answer, (best, second), (token, _) in zip(
            answers, scores.tolist(), found.tolist(), strict=True
        ):
            answer.tokens.append(token)
            answer.logprobs.append(best)
            answer.margins.append(best - second)
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
