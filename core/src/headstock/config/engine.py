"""The settings of an engine, before a machine and a model narrow them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import Factory, frozen

from headstock.config.part_settings import PartSettings
from headstock.config.patterns import (
    DTYPE_SPELLINGS,
    FP8_SPELLINGS,
    GRAPH_BATCH,
    LEVEL_SPELLINGS,
    SGLANG_TOKENS,
    VLLM_RATIO,
    VLLM_SEQS,
)
from headstock.config.setting import collect_settings, setting_field
from headstock.config.setting_rules import (
    DEFAULT_MEMORY_RATIO,
    POOL_SIZES,
    check_pool_sizes,
    check_sequence_length,
    check_step_tokens,
)
from headstock.config.value_types import Choice, Integer, Number, Switch, Text

DEFAULT_RUNNING = 256


@frozen(kw_only=True)
class EngineConfig(PartSettings):
    """The settings of an engine, each checked alone and against the others.

    Plugins and models check what concerns them later.
    raises: UsageError with the setting, the value and the rule
    """

    page_size: int | str = setting_field(
        "--page-size",
        Integer(least=1, word="auto", unset="auto"),
        "auto",
        "tokens in a page of KV storage; with --page-size-or-less, at most this many",
        aliases=("--block-size", "--pa-block-size"),
        default_text="auto: 64 on CUDA, 16 on a CPU, within what the chosen plugins allow",
        group="memory",
    )
    page_size_or_less: bool = setting_field(
        "--page-size-or-less",
        Switch(),
        False,
        "take the largest page size up to --page-size that the plugins allow instead of failing",
        group="memory",
        listed="never",
    )
    num_pages: int | None = setting_field(
        "--num-pages",
        Integer(least=1, word="auto"),
        None,
        "usable pages of the KV pool (the dummy page is not counted)",
        aliases=("--max-num-blocks",),
        default_text="from memory",
        group="memory",
    )
    memory_ratio: float = setting_field(
        "--memory-ratio",
        Number(least=0.0, most=1.0, above=True, rule="a number above 0.0 and at most 1.0"),
        DEFAULT_MEMORY_RATIO,
        (
            "share of the memory free before loading that weights, KV pool and workspaces may take "
            "together"
        ),
        # An alias with a note means something else in its own engine; a line says so when it is
        # used.
        aliases={"--pa-memory-fraction": "", "--gpu-memory-utilization": VLLM_RATIO},
        group="memory",
    )
    kv_memory_mb: int | None = setting_field(
        "--kv-memory-mb",
        Integer(least=1, word="auto"),
        None,
        "size of the KV pool in MiB, the dummy page included",
        aliases=("--pa-memory-mb",),
        default_text="unset",
        group="memory",
    )
    kv_context_len: int | None = setting_field(
        "--kv-context-len",
        Integer(least=1, word="auto"),
        None,
        "tokens that the KV pool must hold",
        aliases=("--pa-context-len",),
        default_text="unset",
        group="memory",
    )
    memory_profiles: str | None = setting_field(
        "--memory-profiles",
        Text(form="DIR", word="off"),
        "~/.cache/headstock/memory",
        "where a start on a GPU keeps what the largest step and graphs take, for the next starts; "
        "off: measure at every start",
        group="memory",
        shapes_steps=False,
    )
    kv_dtype: str = setting_field(
        "--kv-dtype",
        Choice(
            names=("auto", "float32", "bfloat16", "float16", "fp8_e4m3"),
            spellings=DTYPE_SPELLINGS | FP8_SPELLINGS,
        ),
        "auto",
        "type of keys and values in the pool; auto: the model's",
        aliases=("--pa-cache-type", "--kv-cache-dtype"),
        group="memory",
    )
    paged_attn: str = setting_field(
        "--paged-attn",
        Choice(names=("auto", "on", "off")),
        "auto",
        "off: one contiguous region for each sequence, sized for the maximum length",
        group="memory",
    )
    prefix_cache_n: int | None = setting_field(
        "--prefix-cache-n",
        Integer(least=0, word="unlimited"),
        None,
        "finished prefixes kept for reuse, 0 for none",
        default_text="unlimited",
        group="memory",
    )
    snapshot_tokens: int = setting_field(
        "--snapshot-tokens",
        Integer(least=0, most=2**24),
        1024,
        "of models that keep a state: after how many tokens of a prompt it is copied, for prompts "
        "that begin alike, besides its end and where it parts from an earlier one; rounded up to "
        "whole pages; 0: never, and no prefix is reused",
        aliases=("--mamba-track-interval",),
        group="memory",
    )
    snapshot_ratio: float = setting_field(
        "--snapshot-ratio",
        Number(least=0.0, most=0.9, rule="a number from 0.0 to 0.9"),
        0.25,
        "share of the KV pool that such copies may take beside the states of rows, two of them at "
        "least; 0: none, and no prefix is reused",
        group="memory",
    )
    kv_cache: bool = setting_field(
        "--kv-cache",
        Switch(),
        True,
        "off: recompute every token at every step and keep no prefix (for debugging)",
        group="memory",
    )
    max_batch_tokens: int = setting_field(
        "--max-batch-tokens",
        Integer(least=1),
        8192,
        "maximum number of tokens computed in one step; longer prompts are cut into chunks",
        aliases={
            "--max-prefill-length": "",
            "--max-total-tokens": SGLANG_TOKENS,
            "--max-num-batched-tokens": "",
        },
        group="scheduling",
    )
    max_itl_ms: float | str | None = setting_field(
        "--max-itl-ms",
        Number(
            least=0.0, most=1e6, above=True, rule="a number above 0", word="unbounded", auto=True
        ),
        "auto",
        "target step time in ms while requests decode; prompt chunks are sized to meet it",
        default_text="auto: unbounded with a GPU; on a CPU 300 beside streams, or what ten steps "
        "without prompts take",
        group="scheduling",
        shapes_steps=False,
    )
    max_running_requests: int = setting_field(
        "--max-running-requests",
        Integer(least=1),
        Factory(lambda self: min(DEFAULT_RUNNING, self.max_batch_tokens), takes_self=True),
        "maximum number of running requests; the rest wait",
        aliases={"--max-seqs": "", "--max-batch-size": "", "--max-num-seqs": VLLM_SEQS},
        default_text="256, cut to --max-batch-tokens",
        group="scheduling",
    )
    max_queued_requests: int = setting_field(
        "--max-queued-requests",
        Integer(least=1),
        1024,
        "maximum number of requests that wait at a server",
        group="scheduling",
        shapes_steps=False,
        listed="server",
    )
    on_pressure: str = setting_field(
        "--on-pressure",
        Choice(names=("queue", "reject")),
        "queue",
        "queue: preempt and recompute when pages run out; reject: refuse new requests above "
        "--memory-threshold",
        group="scheduling",
        shapes_steps=False,
        listed="server",
    )
    memory_threshold: float = setting_field(
        "--memory-threshold",
        Number(least=0.0, most=1.0, rule="a number between 0.0 and 1.0"),
        0.9,
        "used share of the pool at which --on-pressure reject refuses new requests",
        group="scheduling",
        shapes_steps=False,
        listed="server",
    )
    cuda_graph_max_bs: int | None = setting_field(
        "--cuda-graph-max-bs",
        Integer(least=0, word="auto"),
        None,
        "largest batch size with a CUDA graph, 0 for no graphs",
        aliases={"--graph": GRAPH_BATCH},
        default_text="auto: --max-running-requests",
        group="running",
    )
    cuda_graph_max_tokens: int | None = setting_field(
        "--cuda-graph-max-tokens",
        Integer(least=0, word="auto"),
        None,
        "largest step with prompt tokens, in tokens, that CUDA graphs replay; 0 for none",
        aliases={"--piecewise-cuda-graph-max-tokens": ""},
        default_text="auto: as tuned, or 4096 and full steps",
        group="running",
    )
    defer_graphs: bool = setting_field(
        "--defer-graphs",
        Switch(),
        True,
        "capture CUDA graphs at their first use or when idle; off: all before the first step",
        group="running",
    )
    overlap: bool | None = setting_field(
        "--overlap",
        Switch(word="auto"),
        None,
        "schedule the next step while the device computes",
        default_text="auto: on with a GPU",
        group="running",
    )
    late_planning: bool = setting_field(
        "--late-planning",
        Switch(),
        True,
        "with overlap, schedule a step as late as the device allows, so that arrivals are in it",
        group="running",
        shapes_steps=False,
    )
    tp: int = setting_field(
        "--tp",
        Integer(least=1),
        1,
        "tensor-parallel ranks that share every layer",
        aliases=("--tp-size", "--tensor-parallel-size"),
        group="running",
    )
    ep: bool = setting_field(
        "--ep",
        Switch(),
        False,
        "with --tp, give each rank some experts whole instead of a part of each",
        aliases=("--enable-expert-parallel",),
        group="running",
    )
    # The one field that is not named after its flag: on the command line --seed is the sampling
    # seed of each prompt, in Python `LLM(seed=...)` is the engine's, as vLLM's users expect.
    seed: int = setting_field(
        "--engine-seed",
        Integer(least=0, most=2**63 - 1),
        0,
        "seed of requests without one of their own",
        group="running",
        shapes_steps=False,
    )
    debug_invariants: bool = setting_field(
        "--debug-invariants", Switch(), False, "check schedules, answers, writes", group="running"
    )
    debug_attention: bool = setting_field(
        "--debug-attention", Switch(), False, "compare attention with float32", group="running"
    )
    debug_ops: bool = setting_field(
        "--debug-ops", Switch(), False, "compare operations with plain torch", group="running"
    )
    debug_canary: bool = setting_field(
        "--debug-canary", Switch(), False, "fail when a free page is written", group="running"
    )
    record: str | None = setting_field(
        "--record",
        Text(form="FILE", word="off"),
        None,
        "file to write the schedule to, for replay",
        group="running",
        shapes_steps=False,
    )
    record_overwrite: bool = setting_field(
        "--record-overwrite",
        Switch(),
        False,
        "let --record replace a file that is not empty",
        group="running",
        shapes_steps=False,
    )
    record_prompts: bool = setting_field(
        "--record-prompts",
        Switch(),
        False,
        "record token ids too",
        group="running",
        shapes_steps=False,
    )
    log_level: str = setting_field(
        "--log-level",
        Choice(names=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), spellings=LEVEL_SPELLINGS),
        "INFO",
        "lowest level of log lines to show; LOG_LEVEL in the environment does the same",
        group="running",
        shapes_steps=False,
    )

    # Whether the process began for this engine, so that its age counts in the start's times. Left
    # out of comparisons: it changes no answer.
    is_command: bool = attrs.field(default=False, eq=False, repr=False)

    # Rules between settings hold in the class, so that no source and no caller goes around them.
    def __attrs_post_init__(self) -> None:
        check_pool_sizes({name: getattr(self, name) for name in POOL_SIZES})
        check_sequence_length(
            self.max_seq_len, self.page_size, page_size_or_less=self.page_size_or_less
        )
        check_step_tokens(self.max_batch_tokens, self.max_running_requests)

    def is_other_rank(self, variables: Mapping[str, str]) -> bool:
        """Whether torchrun, or its like, has started this process as another rank than 0."""
        rank = variables.get("RANK", "")
        return self.tp > 1 and rank.isdecimal() and int(rank) > 0


SETTINGS = collect_settings(EngineConfig)
"""The settings by the names of their fields."""
