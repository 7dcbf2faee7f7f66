"""transformers as competing engines.

They run in this process, with the checkpoint, dtype, device and threads of headstock.
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
    """A model without end-of-sequence tokens: the workload sets the lengths.

    dummy: random weights instead of the checkpoint's
    """
    library: Any = transformers  # its types are incomplete
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    # it also raises the errors that it logs
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
    """Raise UsageError for a sampled workload: the engines would generate different tokens."""
    if workload.temperature > 0:
        raise UsageError(
            f"--compare takes greedy workloads, and {workload.name} has temperature "
            f"{workload.temperature}; choose cpu32 or cpu1"
        )


class TransformersGenerate:
    """`generate` with all prompts in one left-padded batch.

    The batch runs until the longest output ends, but only requested tokens count.
    """

    engine = "transformers"
    mode = "generate"
    version = transformers.__version__

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, workload: Workload) -> TimedRun:
        """Run the workload once."""
        width = max(map(len, workload.prompts))
        num_steps = max(workload.outputs)
        begin = time.perf_counter()
        ids = torch.tensor(
            [[0] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts]
        )
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
        )
        device = self.model.device
        # As many steps as the longest output needs: a batch ends as a whole.
        generated = self.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            min_new_tokens=num_steps,
            max_new_tokens=num_steps,
        )
        rows = generated[:, width:].tolist()
        seconds = time.perf_counter() - begin
        return TimedRun(
            seconds,
            tuple(tuple(row[:count]) for row, count in zip(rows, workload.outputs, strict=True)),
        )


class TransformersContinuous:
    """transformers' continuous batching, with a cache that holds all requests at once.

    Each run gets a new manager, made before the clock starts: an old one would find the prompts in
    its cache.
    """

    engine = "transformers"
    mode = "continuous"
    version = transformers.__version__

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, workload: Workload) -> TimedRun:
        """Run the workload once.

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
            # the manager replaces the attention of the model, which `generate` uses next
            self.model.set_attn_implementation(attention)


def make_batching_config(workload: Workload) -> transformers.ContinuousBatchingConfig:
    """A configuration under which all requests of the workload fit at once.

    By default, the manager allocates most of the memory, which takes half a minute.
    """
    settings = transformers.ContinuousBatchingConfig()
    lengths = [
        len(prompt) + count
        for prompt, count in zip(workload.prompts, workload.outputs, strict=True)
    ]
    settings.num_blocks = 1 + sum(-(-length // settings.page_size) for length in lengths)
    return settings


def collect_tokens(manager: Any, workload: Workload) -> OutputTokens:
    """Submit all requests, and wait for the tokens of each.   raises: RuntimeError"""
    for number, (prompt, count) in enumerate(zip(workload.prompts, workload.outputs, strict=True)):
        # no token has the id -1, so no request ends early
        manager.add_request(
            list(prompt), request_id=str(number), max_new_tokens=count, eos_token_id=-1
        )
    tokens: dict[str, tuple[int, ...]] = {}
    while len(tokens) < len(workload.prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(
                f"the manager ended with {len(tokens)} of {len(workload.prompts)} requests done"
            )
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            tokens[result.request_id] = tuple(result.generated_tokens)
    return tuple(tokens[str(number)] for number in range(len(workload.prompts)))
