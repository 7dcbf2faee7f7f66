"""What a decode step on a CPU costs beyond its products and its attention.

    PYTHONPATH=tests python -m benchmarks.step_overhead [--shape qwen3-0.6b] [--rows 8]

The products and the calls of attention of one step are recorded, and replayed alone in their order;
steps of the engine and such replays take turns. Weights are random, in float32. Exit code 1 where a
step without overlap takes more than MOST times its replays.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headstock
from headstock import SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.scheduler import Request
from headstock.startup.device import read_cpu_name
from headstock_bench.conditions import read_commit
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_sdpa.backend import SdpaBackend

PRODUCTS = (
    *("mm", "addmm", "bmm", "linear", "_linear_pointwise", "linear_dynamic_fp16"),
    "fbgemm_linear_fp16_weight_fp32_activation",
)
"""Names of torch's operations that multiply by weights."""
TURNS = 6
STEPS = 8
"""Steps, and replays, of a turn."""
MOST = 1.15
"""Of a step's time and that of its products and attention."""

Calls = list[Callable[[], object]]


class Recording(TorchDispatchMode):
    """Notes the products that are computed while it is on, and calls of attention as one each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []
        self.is_attending = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_attending and func.overloadpacket.__name__ in PRODUCTS:
            self.calls.append(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    @contextmanager
    def watch_attention(self) -> Iterator[None]:
        """Note the calls of `SdpaBackend`."""
        forward = SdpaBackend.forward

        def note(*arguments: Any) -> None:
            self.calls.append(lambda: forward(*arguments))
            self.is_attending = True
            forward(*arguments)
            self.is_attending = False

        SdpaBackend.forward = note  # type: ignore[method-assign]
        try:
            yield
        finally:
            SdpaBackend.forward = forward  # type: ignore[method-assign]


def make_engine(directory: str, rows: int, context: int, overlap: bool, ops: str) -> Engine:
    """An engine in steady decode: so many rows of this context."""
    longest = context + 40 + TURNS * STEPS * 2
    engine = Engine(
        EngineConfig(
            model=directory,
            load_format="dummy",
            device="cpu",
            dtype="float32",
            ops=ops,
            max_running_requests=rows,
            max_seq_len=longest,
            num_pages=rows * -(-longest // 16) + 8,
            overlap=overlap,
        )
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for number in range(rows):
        prompt = rng.integers(10, engine.model.vocab, context - 16).astype(np.int32)
        most = longest - len(prompt) - 1
        engine.submit(Request(id=str(number), prompt=prompt, max_tokens=most, params=params))
    seen: set[str] = set()
    while len(seen) < rows:
        seen |= {update.id for update in engine.step() if update.tokens}
    for _ in range(8):
        engine.step()
    return engine


def record_step(engine: Engine) -> Calls:
    """The products and calls of attention of a step, in order."""
    recording = Recording()
    with recording.watch_attention(), recording:
        engine.step()
    return recording.calls


def time_turns(engine: Engine, calls: Calls) -> tuple[list[float], list[float]]:
    """Milliseconds of a step and of a replay of the calls, by turn."""
    steps, replays = [], []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        middle = time.perf_counter()
        with torch.inference_mode():
            for _ in range(STEPS):
                for call in calls:
                    call()
        end = time.perf_counter()
        steps.append((middle - begin) / STEPS * 1e3)
        replays.append((end - middle) / STEPS * 1e3)
    return steps, replays


def compare_turns(steps: Sequence[float], replays: Sequence[float]) -> dict[str, Any]:
    """Medians of the turns, and the median of their ratios."""
    ratios = [step / replay for step, replay in zip(steps, replays, strict=True)]
    return {
        "step_ms": round(median(steps), 2),
        "replay_ms": round(median(replays), 2),
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
    }


def main() -> int:
    """Print what was found; 1 where a step takes too long."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=MODEL_SHAPES)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--ops", default="auto")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with TemporaryDirectory() as directory:
        write_model_directory(MODEL_SHAPES[asked.shape], Path(directory))
        inline = make_engine(directory, asked.rows, asked.context, False, asked.ops)
        # Before the other begins: its steps run in a thread, and would be noted among these.
        calls = record_step(inline)
        overlapping = make_engine(directory, asked.rows, asked.context, True, asked.ops)
        for name, engine in (("inline", inline), ("overlap", overlapping)):
            found[name] = compare_turns(*time_turns(engine, calls))
        ops = inline.summary.ops
        inline.close()
        overlapping.close()
    about = {
        "cpu": read_cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": read_commit(Path(headstock.__file__)),
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(about | vars(asked) | {"ops": ops, "calls": len(calls)} | found, indent=1))
    return 1 if found["inline"]["ratio"] > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
