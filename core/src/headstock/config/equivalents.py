"""Settings of vLLM and SGLang that headstock lacks, each with what replaces it here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EAGER = "CUDA graphs are replayed where the backend allows it; --runner eager runs without"
PREFIXES = "prefixes are reused by default; --cache-type naive turns that off"
NO_SWAP = "no pages are swapped to the host; a preempted request is recomputed"
NO_OFFLOAD = "weights are not offloaded to the host; a smaller --dtype halves them"
QUANTIZED = (
    "config.json says how weights are quantized, and nothing quantizes them here; "
    "--kv-dtype fp8_e4m3 stores the KV pool in 8 bits"
)
CHUNKED = "long prompts are always cut into chunks of --max-batch-tokens"
ONE_DEVICE = "this version runs on one device"
ADAPTERS = "adapters are not served; merge one into its model"
UNSPECULATIVE = "there is no speculative decoding"
OVERLAP = "steps are scheduled ahead by default; --overlap off turns that off"
OWN_TOKENIZER = "the tokenizer is the one in the model's directory"

EQUIVALENTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), EAGER),
        **dict.fromkeys(("enable_prefix_caching", "disable_radix_cache"), PREFIXES),
        **dict.fromkeys(("quantization", "quantization_config"), QUANTIZED),
        **dict.fromkeys(("swap_space", "kv_offloading_size"), NO_SWAP),
        "cpu_offload_gb": NO_OFFLOAD,
        "trust_remote_code": "code out of a model's directory is never run",
        "enable_chunked_prefill": CHUNKED,
        "chunked_prefill_size": "--max-batch-tokens is the maximum number of tokens computed in "
        "one step",
        "max_seq_len_to_capture": "--cuda-graph-max-bs and --cuda-graph-max-tokens limit what is "
        "captured",
        **dict.fromkeys(("kv_cache_dtype", "cache_dtype"), "--kv-dtype is the type of the KV pool"),
        "mem_fraction_static": "--memory-ratio is the share of the free memory that is used",
        **dict.fromkeys(
            ("context_length", "max_context_len"),
            "--max-seq-len is the maximum number of tokens of a request",
        ),
        "random_seed": "--engine-seed is the seed of requests without one of their own",
        **dict.fromkeys(("async_scheduling", "disable_overlap_schedule"), OVERLAP),
        **dict.fromkeys(
            ("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"), ONE_DEVICE
        ),
        **dict.fromkeys(("distributed_executor_backend", "disable_custom_all_reduce"), ONE_DEVICE),
        **dict.fromkeys(("enable_lora", "lora_modules", "lora_paths"), ADAPTERS),
        **dict.fromkeys(
            ("speculative_config", "speculative_algorithm", "num_speculative_tokens"), UNSPECULATIVE
        ),
        **dict.fromkeys(
            ("tokenizer", "tokenizer_path", "tokenizer_mode", "skip_tokenizer_init"), OWN_TOKENIZER
        ),
        "tokenizer_revision": "--revision is that of the weights and the tokenizer",
        "download_dir": "the environment's HF_HOME says where models are kept",
        "hf_token": "the environment's HF_TOKEN is used",
    }
)
"""The name as a keyword -> a sentence that is true whatever the value, with flags of headstock in
it.
"""


def find_equivalent(name: str) -> str | None:
    """The sentence about another engine's setting, with dashes or underscores; None without one."""
    key = name.lstrip("-").replace("-", "_")
    # vLLM's switches have negatives, such as --no-enable-prefix-caching.
    return EQUIVALENTS.get(key) or EQUIVALENTS.get(key.removeprefix("no_"))
