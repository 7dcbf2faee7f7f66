"""How much of the device an engine takes under the heaviest load: `budget.py TOKENS ROWS`, one line
of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from headstock import SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.scheduler import Request
from headstock.startup.build import build_engine
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory

MOST = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "logprobs": 5,
}


def main(tokens: int, rows: int) -> None:
    """Print the bytes planned for a step, and the share of what was free that was in use after the
    worst step, of an engine that may have half of it.
    """
    with tempfile.TemporaryDirectory() as name:
        write_model_directory(MODEL_SHAPES["qwen3-0.6b"], Path(name))
        sizes = {"max_batch_tokens": tokens, "max_running_requests": rows, "max_seq_len": 4096}
        config = EngineConfig(
            model=name, device="cuda", load_format="dummy", memory_ratio=0.5, **sizes
        )
        tried = build_engine(config)
        planned = tried.memory.other_use.activations
        tried.executor.close()
        del tried
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        engine = Engine(config)
    least = least_free(engine, rows)
    engine.close()
    sys.stdout.write(
        json.dumps({"activations": planned, "taken": round((free - least) / free, 4)}) + "\n"
    )


def least_free(engine: Engine, rows: int) -> int:
    """The fewest bytes of the device that were free after a step, all rows sampled with every
    setting.
    """
    rng = np.random.default_rng(0)
    for number in range(2 * rows):
        prompt = rng.integers(0, 150_000, int(rng.integers(100, 1500))).astype(np.int32)
        params = SamplingParams(max_tokens=20, seed=number, ignore_eos=True, **MOST)
        engine.submit(Request(id=str(number), prompt=prompt, max_tokens=20, params=params))
    least = int(torch.cuda.mem_get_info()[0])
    while engine.has_work:
        engine.step()
        least = min(least, int(torch.cuda.mem_get_info()[0]))
    return least


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
