"""What drafts of a model's own layers gain, when a set share of them is right.

    PYTHONPATH=tests:tests/support python -m gpu.own_drafts --out own-drafts.jsonl \\
        [--shape qwen3.5-27b] [--rows 1 32] [--right 0.7] [--turns 3]

With random weights no draft is right, and steps of several tokens round otherwise than steps of
one, so that answers part. So the layers and the head make drafts in every step, as they do in
service, and what reaches the scheduler is the next tokens, some of them falsified at random; and
embedding and head are replaced by such of which each token is followed by the next id, whatever the
layers add. The engine without drafts comes afterwards, and says the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from headstock import LLM, SamplingParams
from headstock.engine.drafting import Drafting
from headstock.llm import get_session
from headstock.spi.arrays import Ints
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory

LOUDNESS = 500.0
"""Length of a number of the embedding, beside which what all layers add is small."""
SIZES = {1: (128, 512), 32: (512, 256)}
"""Rows -> tokens in and out, those of `single` and `batch32`."""
FEW = 90
"""Ids of prompts are below this, so that small vocabularies have them."""
BEGINNING = 8
"""Tokens by which a row's answer is found."""


@attrs.define(eq=False)
class FalsifiedDrafting(Drafting):
    """Replaces drafts by the next tokens, of which a share is falsified.

    sequences: by the first tokens, all tokens as they are guessed
    """

    sequences: dict[tuple[int, ...], Ints] = attrs.field(factory=dict)

    def _propose(
        self, asked: Any, admission_ids: Ints, busy: set[int], num_rows: int, made: Any
    ) -> Any:
        assert made is not None, "a proposer of the model's own"
        drafts, hold = super()._propose(asked, admission_ids, busy, num_rows, made)
        for number, drafted in asked:
            if number in drafts:
                sequence = self.sequences[tuple(drafted.tokens[:BEGINNING].tolist())]
                guesses = sequence[drafted.length :]
                drafts[number] = guesses[: len(drafts[number])]
        return drafts, hold


def replace_drafts(llm: LLM) -> FalsifiedDrafting:
    """Let the engine verify what its `sequences` will say.   writes: the engine"""
    engine: Any = get_session(llm).engine
    own = engine.drafting
    values = {each.name: getattr(own, each.name) for each in attrs.fields(Drafting)}
    engine.drafting = FalsifiedDrafting(**values)
    found: FalsifiedDrafting = engine.drafting
    return found


def replace_ends(llm: LLM) -> None:
    """Let each token be followed by the next id.   writes: the model's embedding and head"""
    engine: Any = get_session(llm).engine
    executor = getattr(engine.executor, "inner", engine.executor)
    params = executor.runner.program.params
    embed, head = params["embed"].tensor, params["lm_head"].tensor
    assert embed.data_ptr() != head.data_ptr(), "a tied head cannot differ from the embedding"
    embed.mul_(LOUDNESS / embed.float().std())
    # Twins of the embedding's rows: their products with a hidden state find the row that it is.
    head.copy_(embed.roll(1, 0) / LOUDNESS)


def measure(
    settings: dict[str, Any], rows: Sequence[int], right: float, turns: int, sizes: Any
) -> Iterator[dict[str, Any]]:
    """Tokens a second by number of rows, with drafts and then without them."""
    rates = {}
    for proposer in ("mtp", "off"):
        with LLM(**settings, proposer=proposer) as llm:
            falsified = replace_drafts(llm) if proposer == "mtp" else None
            replace_ends(llm)
            for count in rows:
                length, tokens = sizes[count]
                rng = np.random.default_rng(count)
                prompts = [
                    [row, *rng.integers(5, FEW, length - 1).tolist()] for row in range(count)
                ]
                answers = [[each[-1] + 1 + at for at in range(tokens)] for each in prompts]
                if falsified is not None:
                    falsified.sequences = falsify(prompts, answers, right)
                said, _ = generate(llm, prompts, tokens)
                assert said == answers, "the layers are louder than the embedding"
                gc.collect()
                gc.freeze()
                earlier = get_session(llm).engine.stats()
                seconds = [generate(llm, prompts, tokens)[1] for _ in range(turns)]
                stats = get_session(llm).engine.stats()
                steps, stats = stats.executed_steps - earlier.executed_steps, stats.since(earlier)
                gc.unfreeze()
                rate = rates[proposer, count] = count * tokens / statistics.median(seconds)
                line = {"proposer": proposer, "rows": count, "out_tok_s": round(rate, 1)}
                line |= {"seconds": seconds, "steps": steps}
                if falsified is not None:
                    line |= {"right": right, "drafts": stats.draft_line}
                else:
                    line["ratio"] = round(rates["mtp", count] / rate, 3)
                yield line


def falsify(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], right: float
) -> dict[tuple[int, ...], Ints]:
    """Whole sequences by their first tokens, with a share of the tokens right at random."""
    found = {}
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sequence = np.array([*prompt, *answer], np.int32)
        # One more than right, which no vocabulary of ours ends at.
        sequence += np.random.default_rng(row).random(len(sequence)) >= right
        found[tuple(prompt[:BEGINNING])] = sequence
    return found


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """The greedy tokens, and how many seconds they took."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def main() -> None:
    """Append a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="qwen3.5-27b", choices=MODEL_SHAPES)
    parser.add_argument("--model", help="a directory in place of a shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--right", type=float, default=0.7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    is_gpu = asked.device == "cuda"
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "device": asked.device,
        "attn": "fa" if is_gpu else "auto",
        "max_running_requests": 32,
        "max_seq_len": 2048 if is_gpu else 128,
    }
    with tempfile.TemporaryDirectory() as place:
        if asked.model is None:
            write_model_directory(MODEL_SHAPES[asked.shape], Path(place))
        settings["model"] = asked.model or place
        sizes = SIZES if is_gpu else {1: (9, 40), 32: (9, 20)}
        for line in measure(settings, asked.rows, asked.right, asked.turns, sizes):
            about = {"shape": asked.model or asked.shape, "torch": torch.__version__}
            about["gpu"] = torch.cuda.get_device_name() if is_gpu else None
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(about | line) + "\n")
            sys.stderr.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
