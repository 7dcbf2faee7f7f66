"""What drafts gain and cost: one stream with drafts of which a set share is right, and without.

    PYTHONPATH=tests:tests/support python -m gpu.drafts [--turns 25] [--tokens 512] [--ngram]

A proposer drafts the tokens that were recorded of the same engine, some of them falsified. The
engines take turns. A run is recorded again until it repeats itself: steps of several tokens round
16-bit numbers otherwise than steps of one, which changes some near ties. `--ngram` measures
`ngram` itself, with the demo model.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import recorded_proposer
import torch

from headstock import LLM, SamplingParams
from headstock.config import EngineConfig
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory

LEAST = {0.7: 1.3, 0.0: 0.97}
"""Share of drafts that are right -> what tokens a second are to be at least, times those without
drafts.
"""
NGRAM_SETTINGS: dict[str, Any] = {
    "num_pages": 256,
    "max_running_requests": 1,
    "defer_graphs": False,
}
ROUNDS = 6
"""Most recordings until a run repeats itself."""
STORY = "Once upon a time, there was a little fox"
PROMPTS = {
    "repeats": f"{STORY}. {STORY}. {STORY}. ",
    "quotes": "Remember this number: 4711. " * 8,
    "lists": "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, ",
    "story": STORY,
}
"""What the demo model is asked, from much that can be looked up to nothing."""
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "attn": "fa,fi",
    "max_running_requests": 1,
    "max_seq_len": 2048,
    "num_pages": 64,
    "page_size": 64,
}


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """The ratios at the shares of `LEAST`, of the 0.6B shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_directory(MODEL_SHAPES["qwen3-0.6b"], Path(folder))
        found = measure(
            EngineConfig(model=folder, load_format="dummy", **SETTINGS), turns=25, tokens=512
        )
    slow = [share for share, least in LEAST.items() if found["ratio"][str(share)] < least]
    return found | {
        "ok": not slow,
        "slow": slow,
        "ngram": measure_ngram("cuda", turns=7),
        "device": torch.cuda.get_device_name(),
    }


def measure_ngram(device: str, *, turns: int, tokens: int = 128) -> dict[str, Any]:
    """The demo model, one stream: seconds without drafts over those with `ngram`, by prompt, and
    what came of the drafts.
    """
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        plain, drafting = (
            stack.enter_context(LLM("demo", device=device, proposer=proposer, **NGRAM_SETTINGS))
            for proposer in ("off", "ngram")
        )
        for name, prompt in PROMPTS.items():
            ids = plain.get_tokenizer().encode(prompt)
            ratios, said = [], []
            for turn in range(turns + 1):
                before = drafting._session.engine.stats()
                off, own = (generate(llm, ids, tokens) for llm in (plain, drafting))
                said = [off[0], own[0]]
                ratios += [off[1] / own[1]] if turn else []  # the first one warms up
            found[name] = {
                "ratio": [round(value, 3) for value in spread(ratios)],
                "drafts": drafting._session.engine.stats().since(before).draft_line,
                "same_tokens": said[0] == said[1],
            }
    return found


def measure(config: EngineConfig, *, turns: int, tokens: int) -> dict[str, Any]:
    """Tokens a second with drafts over those without, by share, each engine in its turn."""
    from attrs import evolve

    prompt = np.random.default_rng(0).integers(5, 500, 128).tolist()
    found: dict[str, Any] = {"ratio": {}, "tokens_per_second": {}, "drafts": {}}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        recorded_proposer.install(folder)
        sys.path.insert(0, str(folder))
        stack.callback(sys.path.remove, str(folder))
        config = evolve(config, defer_graphs=False)
        plain = stack.enter_context(LLM(config=config))
        first, _ = generate(plain, prompt, tokens)
        engines = {"off": plain}
        for share in LEAST:
            path = folder / f"{share}.json"
            recorded_proposer.write_recording(path, [prompt + first])
            options = (f"recorded.path={path}", f"recorded.right={share}")
            drafting = evolve(config, proposer="recorded", opt=(*config.opt, *options))
            engines[str(share)] = llm = stack.enter_context(LLM(config=drafting))
            found["drafts"][f"{share}, recordings"] = settle(llm, prompt, first, path)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        gc.collect()
        gc.freeze()  # as servers do; a collection of three engines takes as long as a run
        for _ in range(turns):
            for name, llm in engines.items():
                before = llm._session.engine.stats()
                seconds[name].append(generate(llm, prompt, tokens)[1])
                stats = llm._session.engine.stats().since(before)
                found["drafts"][name] = stats.draft_line
        gc.unfreeze()
        # Hosts wander by tens of percent from run to run, so medians are compared, not the runs of
        # a turn.
        off = statistics.median(seconds["off"])
        for name, times in seconds.items():
            found["ratio"][name] = round(off / statistics.median(times), 4)
            rates = [tokens / each for each in times]
            found["tokens_per_second"][name] = [round(value, 1) for value in spread(rates)]
    return found


def settle(llm: LLM, prompt: list[int], said: list[int], path: Path) -> int:
    """Record the run until it repeats itself; how many recordings that took."""
    for number in range(1, ROUNDS + 1):
        again, _ = generate(llm, prompt, len(said))
        if again == said:
            return number
        said = again
        recorded_proposer.write_recording(path, [prompt + said])
    return -1


def generate(llm: LLM, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """The greedy tokens, and how many seconds they took."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm._session.loop.reset_prefix_cache()
    began = time.perf_counter()
    (output,) = llm.generate([prompt], params)
    return list(output.outputs[0].token_ids), time.perf_counter() - began


def spread(values: list[float]) -> tuple[float, float, float]:
    """The median, the least and the most."""
    return statistics.median(values), min(values), max(values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--model", help="a model in place of the 0.6B shape with random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ngram", action="store_true", help="measure `ngram` alone")
    asked = parser.parse_args()
    if asked.ngram:
        sys.stdout.write(json.dumps(measure_ngram(asked.device, turns=asked.turns), indent=2))
        raise SystemExit
    changes = {"device": asked.device} | ({"attn": "auto"} if asked.device == "cpu" else {})
    with tempfile.TemporaryDirectory() as place:
        write_model_directory(MODEL_SHAPES["qwen3-0.6b"], Path(place))
        settings = SETTINGS | changes | {"model": place, "load_format": "dummy"}
        if asked.model:
            settings |= {"model": asked.model, "load_format": "auto"}
        made = EngineConfig(**settings)
        found = measure(made, turns=asked.turns, tokens=asked.tokens)
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
