"""Value types and spellings that settings share, and notes on other engines' flags."""

from __future__ import annotations

from headstock.config.value_types import Text

DTYPE_SPELLINGS = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}
FP8_SPELLINGS = {"fp8": "fp8_e4m3", "f8e4m3": "fp8_e4m3"}
LEVEL_SPELLINGS = {"warn": "WARNING", "WARN": "WARNING"}

VLLM_RATIO = (
    "a share of the memory free before loading; vLLM's flag means a share of the "
    "device's total memory"
)
SGLANG_TOKENS = "the tokens computed in one step; SGLang's flag means the pool's size in tokens"
VLLM_SEQS = (
    "the maximum number of running requests, as in vLLM; Hetero-Paged-Infer's flag counts "
    "the waiting ones too"
)
MARK_SPELLINGS = {
    "none": "off",
    **dict.fromkeys(("qwen3-thinking", "deepseek_r1", "deepseek-r1"), "think"),
    **dict.fromkeys(("deepseek_v3", "glm45"), "qwen3"),
    "magistral": "mistral",
    "seed_oss": "seed",
}
"""Reasoning parsers of vLLM and SGLang -> the marks that they look for."""

GRAPH_BATCH = (
    "the largest batch size that gets a CUDA graph, 0 for none; it is not an on/off switch"
)

NAME = Text(pattern=r"[^\s,]+", rule="one name without spaces or commas", form="NAME")
ATTN = Text(
    pattern=r"[^\s,+]+(,[^\s,+]+)?(\+[^\s,+]+(,[^\s,+]+)?)*",
    rule="one name, or two as PREFILL,DECODE, and more after + for KV groups of other shapes",
    form="P[,D][+P[,D]]",
)
OPTION = Text(
    pattern=r"(?s)[^\s.=]+\.[^\s.=]+=.*", rule="NAME.FIELD=VALUE", form="NAME.FIELD=VALUE"
)
