"""transformers as a contestant, in this process: the same checkpoint, type, device and threads as
the engine.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from headstock import UsageError
from headstock_bench.turns import OutputTokens, TimedRun
from headstock_bench.workloads import Workload


def load_model(directory: Path, dtype: str, device: str, *, dummy: bool) -> Any:
    """The model; `dummy` gives it random weights. No token ends its sequences: the workload says
    how long they are.
    """
    library: Any = transformers  # its types are incomplete
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    # it reports by raising, too
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    kind = library.AutoModelForCausalLM
    if dummy:
        config = library.AutoConfig.from_pretrained(directory, local_files_only=True)
        model = kind.from_config(config, dtype=getattr(torch, dtype))
    else:
        model = kind.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True)
    model.generation_config = library.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return model.to(device).eval()


def check_greedy(workload: Workload) -> None:
    """Raise UsageError for sampled work: the two would be timed at different things."""
    if workload.temperature > 0:
        raise UsageError(
            f"--compare takes greedy workloads, and {workload.name} has temperature "
            f"{workload.temperature}; choose cpu32 or cpu1"
        )


class TransformersGenerate:
    """`generate` with all prompts in one left-padded batch, until the longest output; only
    requested tokens count.
    """

    engine = "transformers"
    mode = "generate"
    version = transformers.__version__

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, workload: Workload) -> TimedRun:
        """Do the work once."""
        longest = max(map(len, workload.prompts))
        most = max(workload.outputs)
        begin = time.perf_counter()
        ids = torch.tensor(
            [[0] * (longest - len(prompt)) + list(prompt) for prompt in workload.prompts]
        )
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
        )
        device = self.model.device
        found = self.model.generate(
            ids.to(device), attention_mask=mask.to(device), min_new_tokens=most, max_new_tokens=most
        )
        rows = found[:, longest:].tolist()
        seconds = time.perf_counter() - begin
        return TimedRun(
            seconds,
            tuple(tuple(row[:count]) for row, count in zip(rows, workload.outputs, strict=True)),
        )


class TransformersContinuous:
    """Continuous batching through its manager, each request with its own length, in a cache that
    holds them all.

    A new manager for each run, made before the clock starts: one that is kept would find the
    prompts in its cache.
    """

    engine = "transformers"
    mode = "continuous"
    version = transformers.__version__

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, workload: Workload) -> TimedRun:
        """Do the work once.

        raises: RuntimeError when a request fails or the manager ends early
        """
        attention = self.model.config._attn_implementation
        try:
            with self.model.continuous_batching_context_manager(
                generation_config=self.model.generation_config,
                continuous_batching_config=make_batching_config(workload),
                timeout=5,
            ) as manager:
                begin = time.perf_counter()
                tokens = collect_tokens(manager, workload)
                return TimedRun(time.perf_counter() - begin, tokens)
        finally:
            self.model.set_attn_implementation(attention)


def make_batching_config(workload: Workload) -> transformers.ContinuousBatchingConfig:
    """Settings under which every request of the workload can run at once.

    Left to itself, the manager takes most of the memory, and half a minute to fill it.
    """
    settings = transformers.ContinuousBatchingConfig()
    lengths = [
        len(prompt) + count
        for prompt, count in zip(workload.prompts, workload.outputs, strict=True)
    ]
    settings.num_blocks = 1 + sum(-(-length // settings.page_size) for length in lengths)
    return settings


def collect_tokens(manager: Any, workload: Workload) -> OutputTokens:
    """What the manager generates for every request.   raises: RuntimeError"""
    for number, (prompt, count) in enumerate(zip(workload.prompts, workload.outputs, strict=True)):
        manager.add_request(
            list(prompt), request_id=str(number), max_new_tokens=count, eos_token_id=-1
        )
    found: dict[str, tuple[int, ...]] = {}
    while len(found) < len(workload.prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(
                f"the manager ended with {len(found)} of {len(workload.prompts)} requests done"
            )
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            found[result.request_id] = tuple(result.generated_tokens)
    return tuple(found[str(number)] for number in range(len(workload.prompts)))
