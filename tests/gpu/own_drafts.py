"""What drafts of a model's own layers gain, when a set share of them is right.

    PYTHONPATH=tests:tests/support python -m gpu.own_drafts --out own-drafts.jsonl \\
        [--shape qwen3.5-27b] [--rows 1 32] [--right 0.7] [--turns 3] [--memory 0.5]

With random weights no draft is right. So the layers and the head make drafts in every step, as they
do in service, and what reaches the scheduler is the tokens that were recorded of the same engine,
some of them falsified by their position alone. A run is recorded again until it repeats itself, as
steps of several tokens round otherwise than steps of one. The engine without drafts takes turns
with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
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

ROUNDS = 6
"""Most recordings until a run repeats itself."""
SIZES = {1: (128, 512), 32: (512, 256)}
"""Rows -> tokens in and out, those of `single` and `batch32`."""
FEW = 90
"""Ids of prompts are below this, so that small vocabularies have them."""
BEGINNING = 8
"""Tokens by which a row's recording is found."""


@attrs.define(eq=False)
class RecordedDrafting(Drafting):
    """Replaces drafts by recorded tokens, of which a share is falsified.

    recordings: by the first tokens, whole sequences; a row without one keeps its drafts
    """

    right: float = 1.0
    recordings: dict[tuple[int, ...], Ints] = attrs.field(factory=dict)

    def _propose(
        self, asked: Any, admission_ids: Ints, busy: set[int], num_rows: int, made: Ints | None
    ) -> Any:
        assert made is not None, "a proposer of the model's own"
        made = made.copy()
        for number, drafted in asked:
            sequence = self.recordings.get(tuple(drafted.tokens[:BEGINNING].tolist()))
            if sequence is not None:
                guesses = self.falsify(sequence, drafted.length)[: made.shape[1]]
                made[number, : len(guesses)] = guesses
        return super()._propose(asked, admission_ids, busy, num_rows, made)

    def falsify(self, sequence: Ints, start: int) -> Ints:
        """The tokens from a position on, some of them one off."""
        positions = np.arange(start, len(sequence))
        # A hash of the position: 0 to 1, and as good as random.
        is_wrong = (positions * 2654435761 % 2**32) / 2**32 >= self.right
        right = sequence[start:]
        return np.where(is_wrong, np.maximum(right - 1, 0) + (right == 0), right)


def replace_drafts(llm: LLM, right: float) -> RecordedDrafting:
    """Let the engine verify recorded tokens.   writes: the engine"""
    engine: Any = get_session(llm).engine
    own = engine.drafting
    values = {each.name: getattr(own, each.name) for each in attrs.fields(Drafting)}
    engine.drafting = RecordedDrafting(**values, right=right)
    found: RecordedDrafting = engine.drafting
    return found


def measure(
    settings: dict[str, Any], rows: Sequence[int], right: float, turns: int, sizes: Any
) -> list[dict[str, Any]]:
    """Tokens a second of both engines, and their ratio, by number of rows."""
    found = []
    with ExitStack() as stack:
        share = settings.pop("memory_ratio")
        plain = stack.enter_context(LLM(**settings, memory_ratio=share))
        drafting = stack.enter_context(LLM(**settings, memory_ratio=0.9, proposer="mtp"))
        recorded = replace_drafts(drafting, right)
        engines = {"off": plain, "mtp": drafting}
        for count in rows:
            length, tokens = sizes[count]
            rng = np.random.default_rng(count)
            prompts = [[row, *rng.integers(5, FEW, length - 1).tolist()] for row in range(count)]
            recordings = record(drafting, recorded, prompts, tokens)
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            lines = {}
            gc.collect()
            gc.freeze()
            for _ in range(turns):
                for name, llm in engines.items():
                    before = llm._session.engine.stats()
                    seconds[name].append(generate(llm, prompts, tokens)[1])
                    stats = llm._session.engine.stats().since(before)
                    lines[name] = stats.draft_line
            gc.unfreeze()
            rates = {
                name: round(count * tokens / statistics.median(times), 1)
                for name, times in seconds.items()
            }
            found.append(
                {
                    "rows": count,
                    "right": right,
                    "recordings": recordings,
                    "out_tok_s": rates,
                    "ratio": round(rates["mtp"] / rates["off"], 3),
                    "seconds": seconds,
                    "drafts": lines["mtp"],
                }
            )
    return found


def record(llm: LLM, recorded: RecordedDrafting, prompts: list[list[int]], tokens: int) -> int:
    """Record the run until it repeats itself; how many recordings that took, -1 for too many."""
    recorded.recordings.clear()
    said, _ = generate(llm, prompts, tokens)
    for number in range(1, ROUNDS + 1):
        for prompt, answer in zip(prompts, said, strict=True):
            recorded.recordings[tuple(prompt[:BEGINNING])] = np.array(prompt + answer, np.int32)
        again, _ = generate(llm, prompts, tokens)
        if again == said:
            return number
        said = again
    return -1


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
    parser.add_argument("--memory", type=float, default=0.5)
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
        "memory_ratio": asked.memory,
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
