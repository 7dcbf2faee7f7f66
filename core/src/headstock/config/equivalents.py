"""Settings of vLLM and SGLang that headstock lacks, each with what replaces it here.

Values that match headstock's behaviour are accepted, as are those with an equivalent setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

EAGER = "CUDA graphs are replayed where the backend allows it; runner (--runner) eager runs without"
PREFIXES = "prefixes are reused by default; cache_type (--cache-type) naive turns that off"
NO_SWAP = "no pages are swapped to the host; a preempted request is recomputed"
NO_OFFLOAD = "weights are not offloaded to the host; a smaller dtype (--dtype) halves them"
QUANTIZED = (
    "config.json says how a checkpoint is quantized; quant (--quant) fp8, int8 or int4 quantizes "
    "one at load; kv_dtype (--kv-dtype) fp8_e4m3 stores the KV pool in 8 bits"
)
CHUNKED = "long prompts are always cut into chunks of max_batch_tokens (--max-batch-tokens)"
ONE_DEVICE = "ranks share every layer (tp, --tp); this version has no other parallelism"
EXPERTS = "ep (--ep) cuts experts by number over the ranks of tp (--tp), as many as these are"
ADAPTERS = "LoRA adapters are not supported; merge one into its model"
SPECULATION = (
    "proposer (--proposer) ngram proposes the tokens that followed the latest ones earlier, draft "
    "those of a second model, draft_model (--draft-model), mtp those of the checkpoint's own layers"
)
OVERLAP = "steps are scheduled ahead by default; overlap (--overlap) off turns that off"
OWN_TOKENIZER = "the tokenizer is the one in the model's directory"

EQUIVALENTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), EAGER),
        **dict.fromkeys(("enable_prefix_caching", "disable_radix_cache"), PREFIXES),
        **dict.fromkeys(("quantization", "quantization_config"), QUANTIZED),
        **dict.fromkeys(("swap_space", "kv_offloading_size"), NO_SWAP),
        "cpu_offload_gb": NO_OFFLOAD,
        "trust_remote_code": "code in a model's directory is never run",
        "enable_chunked_prefill": CHUNKED,
        "chunked_prefill_size": "max_batch_tokens (--max-batch-tokens) is the maximum number of "
        "tokens computed in one step",
        "max_seq_len_to_capture": "cuda_graph_max_bs (--cuda-graph-max-bs) and "
        "cuda_graph_max_tokens (--cuda-graph-max-tokens) limit what "
        "is captured",
        "cache_dtype": "kv_dtype (--kv-dtype) is the type of the KV pool",
        "mem_fraction_static": (
            "memory_ratio (--memory-ratio) is the share of the free memory that is used"
        ),
        **dict.fromkeys(
            ("context_length", "max_context_len"),
            "max_seq_len (--max-seq-len) is the maximum number of tokens of a request",
        ),
        "random_seed": "seed (--engine-seed) is the seed of requests without one of their own",
        **dict.fromkeys(("async_scheduling", "disable_overlap_schedule"), OVERLAP),
        **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), ONE_DEVICE),
        **dict.fromkeys(("ep_size", "expert_parallel_size"), EXPERTS),
        **dict.fromkeys(("distributed_executor_backend", "disable_custom_all_reduce"), ONE_DEVICE),
        **dict.fromkeys(("enable_lora", "lora_modules", "lora_paths"), ADAPTERS),
        **dict.fromkeys(
            ("speculative_config", "speculative_algorithm", "num_speculative_tokens"), SPECULATION
        ),
        **dict.fromkeys(
            ("tokenizer", "tokenizer_path", "tokenizer_mode", "skip_tokenizer_init"), OWN_TOKENIZER
        ),
        "compilation_config": EAGER,
        "hf_overrides": "config.json is read as it is; change a copy of it",
        "tokenizer_revision": "revision (--revision) is that of the weights and the tokenizer",
        "download_dir": "the environment's HF_HOME says where models are kept",
        "hf_token": "the environment's HF_TOKEN is used",
    }
)
"""The name as a keyword -> a sentence that is true whatever the value, with flags of headstock in
it.
"""


SAME: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "enable_prefix_caching": (True,),
        "disable_radix_cache": (False,),
        "enforce_eager": (False,),
        "disable_cuda_graph": (False,),
        "async_scheduling": (True,),
        "disable_overlap_schedule": (False,),
        "enable_chunked_prefill": (True,),
        "trust_remote_code": (False,),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "ep_size": (1,),
        "expert_parallel_size": (1,),
        "distributed_executor_backend": (None, "uni", "mp"),
        "disable_custom_all_reduce": (True, False),
        # Several answers to a prompt share its pages, and a preempted request is recomputed: pages
        # on the host would never be used.
        "swap_space": (0, 4),
        "cpu_offload_gb": (0,),
        "kv_offloading_size": (None, 0),
        **dict.fromkeys(("speculative_config", "tokenizer_revision"), (None,)),
        # Names of what the checkpoint is, which config.json says too.
        "quantization": (
            *(None, "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt"),
            *("mxfp4", "fbgemm_fp8"),
        ),
        "tokenizer": (None,),
        "tokenizer_mode": ("auto",),
        "skip_tokenizer_init": (False,),
        "enable_lora": (False,),
        "enable_sleep_mode": (False,),
        "use_v2_block_manager": (True,),
        "task": (None, "auto", "generate"),
        "generation_config": ("auto",),
        "limit_mm_per_prompt": (None, {}),
        "disable_log_stats": (True, False),
        "disable_log_requests": (True,),
        "enable_log_requests": (False,),
        "enable_auto_tool_choice": (True,),
        "enable_tokenizer_info_endpoint": (True,),
    }
)
"""The name -> the values that match headstock's behaviour."""

TAKEN: Mapping[str, tuple[object, str, object]] = MappingProxyType(
    {
        "quantization": ("fp8", "quant", "fp8"),
        "enforce_eager": (True, "runner", "eager"),
        "disable_cuda_graph": (True, "runner", "eager"),
        "enable_prefix_caching": (False, "cache_type", "naive"),
        "disable_radix_cache": (True, "cache_type", "naive"),
        "async_scheduling": (False, "overlap", False),
        "disable_overlap_schedule": (True, "overlap", False),
    }
)
"""The name -> a value, and the setting here with the value that does the same."""


@frozen
class Meaning:
    """What another engine's setting means here: a setting and its value; no setting when it is so
    anyway.
    """

    setting: str = ""
    value: object = None


def find_meaning(word: str, value: object) -> Meaning | None:
    """The meaning of another engine's setting with this value; None when it has none here."""
    taken = TAKEN.get(word)
    if taken is not None and _is_same(taken[0], value):
        return Meaning(*taken[1:])
    same = any(_is_same(each, value) for each in SAME.get(word, ()))
    return Meaning() if same else None


def _is_same(wanted: object, value: object) -> bool:
    """Whether two values are equal, and not one of them True and the other 1."""
    return isinstance(wanted, bool) == isinstance(value, bool) and wanted == value


def find_equivalent(name: str) -> str | None:
    """The sentence about another engine's setting, with dashes or underscores; None without one."""
    key = name.lstrip("-").replace("-", "_")
    # vLLM's switches have negatives, such as --no-enable-prefix-caching.
    return EQUIVALENTS.get(key) or EQUIVALENTS.get(key.removeprefix("no_"))
